"""Layouts: how ranks share a model. What cannot be is one sentence.

    devices = TP · CP · PP · DP      EP divides TP · CP · DP      experts' data parallel group: TP · CP · DP / EP

Ranks are numbered as Megatron-LM does: tensor parallel ranks are neighbours, then context, data, and last pipeline
ranks. Experts are not split over tensor parallel ranks (ETP 1): each such rank routes its own share of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagestash.models.config import DecoderConfig
from pagestash.schedules.plan import ONE_STAGE, V_SHAPED, schedule_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The degree of each kind of parallelism; data parallelism is what is left of the devices."""

    devices: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    vpp: int = 1
    """Stages of each pipeline rank."""
    zero: Literal[0, 1, 2, 3] = 1
    """Data parallel ranks share: 0 nothing, 1 the optimizer's state, 2 gradients, too, 3 weights, too (FSDP2)."""
    schedule: str = "1F1B"

    def __post_init__(self) -> None:
        for name in ("devices", "tp", "cp", "ep", "pp", "vpp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value}: expected a whole number, at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero}: expected 0, 1, 2 or 3")
        shared = self.tp * self.cp * self.pp
        if self.devices % shared:
            raise ValueError(
                f"TP {self.tp} · CP {self.cp} · PP {self.pp} = {shared} does not divide {self.devices} devices"
            )
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"EP {self.ep} does not divide the {self.stage_ranks} ranks of a pipeline stage "
                f"({self.devices} devices / PP {self.pp})"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        name = schedule_name(self.schedule)
        object.__setattr__(self, "schedule", name)
        if name in ONE_STAGE and self.vpp != 1:
            raise ValueError(
                f"{name} has one stage a rank: VPP {self.vpp} needs a schedule such as Interleaved1F1B"
            )
        if name in V_SHAPED and self.vpp != 2:
            raise ValueError(f"{name} has two stages a rank: expected VPP 2, not {self.vpp}")
        if name not in ONE_STAGE and name not in V_SHAPED and self.vpp < 2:
            raise ValueError(f"{name} needs VPP 2 or more; with one stage a rank, use 1F1B")

    @property
    def dp(self) -> int:
        return self.devices // (self.tp * self.cp * self.pp)

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold one pipeline rank's stages together."""
        return self.devices // self.pp

    @property
    def dense_group(self) -> int:
        """Ranks that hold the same attention and dense weights, and so share their optimizer state."""
        return self.dp * self.cp

    @property
    def expert_group(self) -> int:
        """Ranks that hold the same experts."""
        return self.stage_ranks // self.ep

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def microbatches(self, global_batch: int, microbatch: int) -> int:
        """Microbatches of `microbatch` sequences that each pipeline runs in a step."""
        for name, value in (("global batch", global_batch), ("microbatch", microbatch)):
            if value < 1:
                raise ValueError(f"{name} {value}: expected at least 1")
        if global_batch % (microbatch * self.dp):
            raise ValueError(
                f"global batch {global_batch} does not divide into microbatches of {microbatch} on DP {self.dp}"
            )
        return global_batch // (microbatch * self.dp)

    def check_model(self, config: DecoderConfig, sequence: int) -> None:
        """Refuse what this model cannot be divided into."""
        if config.experts % self.ep:
            raise ValueError(f"EP {self.ep} does not divide {config.experts} experts")
        if config.heads % self.tp:
            raise ValueError(f"TP {self.tp} does not divide {config.heads} heads")
        if config.attention == "gqa" and (config.kv_heads or config.heads) % self.tp:
            raise ValueError(f"TP {self.tp} does not divide {config.kv_heads} heads of keys and values")
        if sequence < 1 or sequence % (self.cp * self.tp):
            raise ValueError(f"CP {self.cp} · TP {self.tp} does not divide a sequence of {sequence} tokens")
        if self.stages > config.layers + 2:
            raise ValueError(
                f"PP {self.pp} · VPP {self.vpp} = {self.stages} stages: the model has only {config.layers} layers, "
                "an embedding and a head"
            )


def place_evenly(layers: int, stages: int) -> list[int]:
    """Layers of each stage: `ceil(layers / stages)` from the first, what is left at the end.

    Where that would leave more stages without a layer than the last one, which has the head, stages differ by one
    layer instead, and the first and the last have the fewer.

    >>> place_evenly(14, 4)
    [4, 4, 4, 2]
    >>> place_evenly(9, 8)
    [1, 2, 1, 1, 1, 1, 1, 1]
    """
    each = -(-layers // stages)
    if (stages - 1) * each < layers + each:
        return [max(0, min(each, layers - stage * each)) for stage in range(stages)]
    few, more = divmod(layers, stages)
    inner = [*range(1, stages - 1), 0, stages - 1]
    return [few + (stage in inner[:more]) for stage in range(stages)]


def place_as_torchtitan(layers: int, stages: int) -> list[int] | None:
    """torchtitan's division: stages at the front have one more, where the embedding and the head count as a layer.

    None if it would make another number of stages.
    """
    few, more = divmod(layers + 2, stages)
    if not few or -(-(layers + 2) // (few + bool(more))) != stages:
        return None
    placed = [few + (stage < more) for stage in range(stages)]
    return [placed[0] - 1, *placed[1:-1], placed[-1] - 1]


def check_placement(placed: Sequence[int], layers: int, stages: int) -> None:
    if len(placed) != stages or sum(placed) != layers or min(placed) < 0:
        raise ValueError(
            f"{len(placed)} stages with {sum(placed)} layers in all: expected {stages} stages with {layers} layers"
        )
