"""What a step costs on a described cluster: the values that the replay reads, made by `build.step_costs`.

A *stage* is a number of consecutive layers on one pipeline rank; with virtual stages (VPP) a rank has several. All
values are of one rank of its tensor, context, expert and data parallel groups, for one microbatch. Where rows are
not balanced, seconds are those of the hottest rank, for which the others wait, and bytes those of the fullest one.

Communication is not part of the compute seconds. Backward sends what forward received: `combine` before the
experts' backward, `dispatch` after it, as long as in forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagestash.policy import HomeName
from pagestash.schedules.plan import Plan
from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.model.framework import Margin


@dataclass(frozen=True, slots=True)
class Amount:
    """Seconds or bytes: of what comes before dispatch, and of experts' rows between dispatch and combine."""

    fixed: float = 0.0
    routed: float = 0.0

    @property
    def total(self) -> float:
        return self.fixed + self.routed

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.fixed + other.fixed, self.routed + other.routed)

    def __mul__(self, factor: float) -> "Amount":
        return Amount(self.fixed * factor, self.routed * factor)

    def __bool__(self) -> bool:
        return bool(self.fixed or self.routed)


NOTHING = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer, the embedding or the head, for one microbatch."""

    name: str
    forward: Amount
    """Seconds of compute, collectives of tensor and context parallelism included."""
    backward_input: Amount
    backward_weight: Amount
    recompute: float = 0.0
    """Seconds of forward that backward repeats."""
    dispatches_again: bool = False
    """Whether that includes dispatch and combine."""
    dispatch_seconds: float = 0.0
    """Of dispatch, with all links to itself; combine takes as long."""
    waits_for_rows: bool = False
    """Whether the host waits in forward for the number of received rows."""
    gather_seconds: float = 0.0
    """Of gathering sharded weights (ZeRO 3), before forward and again before backward, beside compute."""
    saved: Mapping[HomeName, Amount] = field(default_factory=dict)
    """Bytes that forward saves for backward, by home: `recompute` are those dropped, `offload` those moved."""
    stash_seconds: float = 0.0
    """Of copying into pages, and again of copying back."""
    offload_seconds: Amount = NOTHING
    """What copies over the host link take of the device's memory from compute beside them, each way."""
    workspace: int = 0
    """Most temporary bytes while its backward runs; those that recompute brings back are included."""
    launch_seconds: Amount = NOTHING
    """In which the host launches its forward."""
    relaunch_seconds: float = 0.0
    """The same of what backward repeats."""

    def bytes_of(self, home: HomeName) -> Amount:
        return self.saved.get(home, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage, for one microbatch."""

    stage: int
    layers: tuple[LayerCosts, ...]
    send_seconds: float = 0.0
    """To the next stage in forward, and as long back in backward; 0 for the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """The peak of one rank, by what holds it."""

    groups: Mapping[str, int] = field(default_factory=dict)
    """Allocated bytes; those of `STATIC` are there for the whole run."""
    host: int = 0
    """The most that is on the host at one time."""

    @property
    def total(self) -> int:
        return sum(self.groups.values())

    @property
    def static(self) -> int:
        return sum(self.groups.get(name, 0) for name in STATIC)


STATIC = ("weights", "gradients", "optimizer", "pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """One pipeline rank."""

    plan: Plan
    stages: tuple[StageCosts, ...] = ()
    """In the order of the model."""
    peak: RankPeak = field(default_factory=RankPeak)
    outside: int = 0
    """Bytes of the device that are not torch's: CUDA context, NCCL and so on."""
    end_seconds: float = 0.0
    """After the last action: gradients are reduced and weights gathered over data parallel ranks, and the
    optimizer's step."""

    @property
    def layer_names(self) -> list[str]:
        """In the order of the model, without the embedding and the head."""
        names = (layer.name for stage in self.stages for layer in stage.layers)
        return [name for name in names if name.startswith("layers.")]

    @property
    def device_bytes(self) -> int:
        """What the rank takes of the device."""
        return self.peak.total + self.outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What ranks run on, and how."""

    link: HostLink
    overlaps_dispatch: bool = False
    """Whether dispatch and combine of one microbatch run beside the compute of another."""
    beside_compute: float = 1.0
    """Seconds of dispatch and combine beside compute, over those alone."""
    taken_by_dispatch: float = 0.0
    """The share of compute that dispatch and combine take while they run beside it."""
    margin: Margin = "window"
    """How offloaded groups leave and return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """One step of one pipeline group: everything that the replay needs."""

    ranks: tuple[RankCosts, ...]
    machine: Machine

    @property
    def stages(self) -> tuple[StageCosts, ...]:
        """All stages in the order of the model."""
        return tuple(sorted((s for rank in self.ranks for s in rank.stages), key=lambda found: found.stage))

    @property
    def plans(self) -> Sequence[Plan]:
        return [rank.plan for rank in self.ranks]
