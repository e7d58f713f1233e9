"""Check a run's settings, before anything is written."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pagestash.device import device_memory, find_device
from pagestash.models.config import DecoderConfig
from pagestash.models.costs import layer_costs
from pagestash.models.decoder import Decoder
from pagestash.pipeline.overlapped import OVERLAPPED
from pagestash.pipeline.stages import Partition, partition
from pagestash.policy import Policy, Rule
from pagestash.schedules.plan import SPLIT_BACKWARD, schedule_name, stages_a_rank
from pagestash.sizes import format_bytes
from pagestash.train import checkpoint
from pagestash.train.config import TrainConfig, checked, merge
from pagestash.train.data import Corpus, load_corpus
from pagestash.train.folder import SETTINGS, RunError, read_settings, reason
from pagestash.train.metrics import METRICS, recorded
from pagestash.train.parallel import World, parameters_a_rank

COUNT_ONLY = (Rule("*", "keep"),)
"""The rules of a run without a policy, so that the keeper counts bytes for the metrics. They cover all modules, so
that weights that FSDP2 gathers are not counted as activations."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run whose settings were checked."""

    config: TrainConfig
    decoder: DecoderConfig
    policy: Policy
    corpus: Corpus
    world: World
    device: torch.device
    out: Path
    start: Path | None
    """The checkpoint to resume from."""
    placed: Partition | None = None
    """With a pipeline: which layers are on which stage."""
    resumes: bool = False
    notices: tuple[str, ...] = ()
    """What a user should know about the run that is resumed."""

    @property
    def graphed(self) -> bool:
        """Whether steps are CUDA graphs. FSDP and schedules decide on the host which collectives to run."""
        alone = self.world.size == 1 or not (self.config.shard or self.world.pipeline > 1)
        return self.config.graph and self.device.type == "cuda" and alone


def prepare(settings: Mapping[str, Any], out: str | Path, *, resume: bool = False) -> RunPlan:
    """Check `settings` (as `checked` returns them) against each other, the machine and what `out` holds.

    A wrong setting raises `ValueError` with one line. With `resume`, the run's own settings are the defaults.
    """
    out, settings = Path(out), checked(settings)
    found = _look(out, resume)
    start = found.start
    config = merge(found.config, settings)
    for name in ("schedule", "chunks"):
        if name in settings and config.pipeline == 1:
            raise ValueError(f"{name}={settings[name]!r} is for a pipeline: pass --pp, or leave it out")
    decoder = config.decoder()
    world = World.from_environment(config, decoder.experts)
    if config.overlap:
        _check_overlap(config, world)
    if config.capacity_factor:
        rows = config.tokens * decoder.top_k
        decoder = config_with_capacity(config, max(1, round(config.capacity_factor * rows)))
    policy = Policy() if config.policy == "none" else Policy.load(config.policy)
    if not policy.rules:
        policy = replace(policy, rules=COUNT_ONLY)
    device = _device(config.device, world)
    _check_room(config, decoder, policy, device)
    skeleton = _skeleton(decoder, world, device, shard=config.shard)
    policy.check([name for name, _ in skeleton.named_modules()])
    if start is not None:
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        checkpoint.check_shapes(start, shapes)
    placed = _place(config, decoder, world, device) if world.pipeline > 1 else None
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard=true: the tensorboard package is not installed")
    corpus = load_corpus(config.corpus, config.sequence + 1)
    if found.corpus not in (None, corpus.digest) and "corpus" not in settings:
        raise ValueError(
            f"{out}: the corpus has changed since this run began; to use the new one, pass --corpus"
        )
    if found.step > config.steps:
        raise ValueError(f"{out}: the run is at step {found.step}, past steps={config.steps}")
    plan = RunPlan(
        config, decoder, policy, corpus, world, device, out, start, placed, resume, tuple(found.notices)
    )
    check_graph(plan)
    return plan


def check_graph(plan: RunPlan) -> None:
    """Raise if steps are to be CUDA graphs, and something in them asks the host."""
    if plan.graphed and plan.world.expert_parallel > 1 and plan.config.dispatch == "all_to_all_exact":
        raise ValueError(
            "dispatch='all_to_all_exact' reads counts on the host, which a CUDA graph cannot; use all_to_all or "
            "all_gather, or pass --set graph=false"
        )


def check_unchanged(plan: RunPlan) -> None:
    """Raise if another run wrote to the folder after the plan was made."""
    if _look(plan.out, plan.resumes).start != plan.start:
        raise RunError(f"{plan.out}: another run has written there meanwhile; start again")


def _check_room(config: TrainConfig, decoder: DecoderConfig, policy: Policy, device: torch.device) -> None:
    """Raise if a hidden state of a microbatch, a buffer of the experts, or the pool cannot fit."""
    if decoder.vocab < 256:
        raise ValueError(f"model.vocab={decoder.vocab}: expected at least 256, one for each byte")
    most = device_memory(device)
    row = 4 * decoder.width
    needed = {
        f"batch={config.batch}, sequence={config.sequence}: one hidden state": config.tokens * row,
        f"batch={config.batch}: its text": 8 * config.batch * (config.sequence + 1),
        f"capacity of {decoder.capacity} rows: one buffer of the experts": (decoder.capacity or 0) * row,
        "policy pool device: it": policy.pool.device_bytes or 0,
    }
    for what, size in needed.items():
        if size > most:
            raise ValueError(f"{what} takes {format_bytes(size)}, {device} has {format_bytes(most)}")


def _skeleton(decoder: DecoderConfig, world: World, device: torch.device, *, shard: bool) -> Decoder:
    """The model on the meta device; raises if its weights would not fit."""
    try:
        skeleton = Decoder(decoder, device="meta")
    except RuntimeError as error:  # a tensor's bytes must fit in 64 bits
        raise ValueError(f"the model is too large: {error}") from error
    # In float32: weights, gradients and the optimizer's two moments.
    needed = 16 * parameters_a_rank(skeleton, world, shard=shard)
    if needed > device_memory(device):
        raise ValueError(
            f"weights, gradients and optimizer of this model take {format_bytes(needed)} a rank, {device} has "
            f"{format_bytes(device_memory(device))}; --layers cuts it"
        )
    return skeleton


def _place(config: TrainConfig, decoder: DecoderConfig, world: World, device: torch.device) -> Partition:
    """The layers of each stage, from the formulas of their costs."""
    name = schedule_name(config.schedule)
    if name in SPLIT_BACKWARD and not splits_backward():
        raise ValueError(
            f"schedule={name!r} splits backward in two, which needs torch 2.13 or later for custom autograd "
            f"functions such as the experts', and this is torch {torch.__version__}; use a schedule that does not, "
            "such as Interleaved1F1B"
        )
    chunks = stages_a_rank(name, config.chunks or None)
    costs = layer_costs(
        decoder,
        tokens=config.tokens,
        sequence=config.sequence,
        element_bytes=2 if device.type == "cuda" else 4,
        shards=world.peers,
        expert_parallel=world.expert_parallel,
    )
    stages = world.pipeline * chunks
    return partition(costs, stages, name, microbatches=config.parts, chunks=chunks, overlap=config.overlap)


def _check_overlap(config: TrainConfig, world: World) -> None:
    if config.parts < 2:
        raise ValueError(
            f"overlap=True: a step needs two microbatches or more, and has {config.parts}; --set microbatches=2"
        )
    if config.pipeline == 1 and config.shard and world.size > 1:
        raise ValueError(
            "overlap=True needs shard=False, or a pipeline: FSDP2 would take away a layer's weights after its "
            "backward, while the forward of the next microbatch is in it"
        )
    if config.pipeline > 1 and schedule_name(config.schedule) not in OVERLAPPED:
        raise ValueError(
            f"overlap=True: schedule={config.schedule!r} has no pairs of a forward and a backward; expected one of "
            f"{', '.join(OVERLAPPED)}"
        )


def splits_backward() -> bool:
    """Whether this torch can split the backward of a custom autograd function into two halves.

    In torch 2.11 the weight half reads `_input_metadata`, which such a function's node does not have, and gloo
    cannot send to the same rank, as V-shaped schedules do. torch 2.13 can do both.
    """
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def config_with_capacity(config: TrainConfig, rows: int) -> DecoderConfig:
    """The model with expert buffers of `rows` rows."""
    return merge(config.to_json(), {"model": {"capacity": rows}}).decoder()


@dataclass(slots=True)
class _Found:
    """What a folder holds of a run that is to be resumed."""

    start: Path | None = None
    step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    corpus: str | None = None
    notices: list[str] = field(default_factory=list)


def _look(out: Path, resume: bool) -> _Found:
    try:
        return _resumed(out) if resume else _fresh(out)
    except OSError as error:
        raise RunError(f"--out {out}: {reason(error)}") from error


def _fresh(out: Path) -> _Found:
    if out.exists() and not out.is_dir():
        raise RunError(f"--out {out}: it is a file")
    if _holds_a_run(out):
        raise RunError(f"--out {out} holds another run; --resume continues it")
    return _Found()


def _resumed(out: Path) -> _Found:
    if not _holds_a_run(out):
        raise RunError(f"--resume: there is no run in {out}")
    found, settings = _Found(checkpoint.latest(out)), read_settings(out)
    if settings is not None:
        found.config, found.corpus = _checked(settings.config, out / SETTINGS), settings.corpus
    if found.start is not None:
        _take_checkpoint(found, found.start, fresh=settings is None)
    if settings is None and found.start is None:
        raise RunError(
            f"--resume: {out} has neither a checkpoint nor {SETTINGS}: they are gone; begin again "
            "in another folder"
        )
    reached = (settings and settings.checkpoint) or 0
    if found.start is None and reached:
        raise RunError(
            f"--resume: the checkpoints of {out} are gone, the last one was of step {reached}; bring them back, or "
            "begin again in another folder"
        )
    if found.start is None:
        found.notices.append(f"{out} has no checkpoint yet; its run begins again, with its settings")
    elif reached > found.step:
        found.notices.append(f"the run had a checkpoint of step {reached}, which is gone")
    lines, torn = recorded(out)
    if torn:
        found.notices.append(f"the last line of {METRICS} was not written to its end, and is dropped")
    if found.step and len([step for step, _ in lines if step <= found.step]) < found.step:
        found.notices.append(f"{METRICS} lacks lines of steps before {found.step + 1}")
    return found


def _take_checkpoint(found: _Found, start: Path, *, fresh: bool) -> None:
    state = checkpoint.read_state(start)
    found.step = state["step"]
    if fresh:
        if not isinstance(state.get("config"), Mapping) or not isinstance(state.get("corpus"), str):
            raise RunError(f"checkpoint {start}: {checkpoint.STATE} lacks the settings of the run")
        found.config, found.corpus = _checked(state["config"], start), state["corpus"]


def _checked(config: Any, where: Path) -> dict[str, Any]:
    try:
        return checked(config)
    except ValueError as error:
        raise RunError(f"{where}: {error}") from error


def _holds_a_run(out: Path) -> bool:
    return any((out / name).exists() for name in (METRICS, SETTINGS, checkpoint.FOLDER))


def _device(name: str, world: World) -> torch.device:
    device = find_device(name, f"device={name!r}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", world.local)
    return device
