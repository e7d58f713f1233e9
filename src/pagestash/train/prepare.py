"""Everything that can be wrong with a run is found here, before anything is written."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagestash.device import find_device
from pagestash.models.config import DecoderConfig
from pagestash.models.costs import layer_costs
from pagestash.models.decoder import Decoder
from pagestash.pipeline.plan import schedule_name, stages_a_rank
from pagestash.pipeline.stages import Partition, partition
from pagestash.policy import Policy
from pagestash.train import checkpoint
from pagestash.train.config import TrainConfig, checked, merge
from pagestash.train.data import Corpus, load_corpus
from pagestash.train.metrics import METRICS
from pagestash.train.parallel import World


@dataclass(frozen=True, slots=True)
class Plan:
    """A run whose settings fit together."""

    config: TrainConfig
    decoder: DecoderConfig
    policy: Policy
    corpus: Corpus
    world: World
    device: torch.device
    out: Path
    start: Path | None
    """The checkpoint to go on from."""
    placed: Partition | None = None
    """With a pipeline: which layers stand on which stage."""


def prepare(settings: Mapping[str, Any], out: str | Path, *, resume: bool = False) -> Plan:
    """Check `settings` (as `checked` returns them) against each other, the machine and what `out` holds.

    A wrong one is a `ValueError` of one line. With `resume`, settings that are not given are those of the run.
    """
    out = Path(out)
    start = _start(out, resume)
    saved = checkpoint.read_state(start) if start else {}
    config = merge(checked(saved.get("config", {})), settings)
    decoder = config.decoder()
    world = World.from_environment(config, decoder.experts)
    if config.capacity_factor:
        rows = config.tokens * decoder.top_k
        decoder = config_with_capacity(config, max(1, round(config.capacity_factor * rows)))
    policy = Policy() if config.policy == "none" else Policy.load(config.policy)
    skeleton = Decoder(decoder, device="meta")
    policy.check([name for name, _ in skeleton.named_modules()])
    if start is not None:
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        checkpoint.check_shapes(start, shapes)
    device = _device(config.device, world)
    placed = _place(config, decoder, world, device) if world.pipeline > 1 else None
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard=true: the tensorboard package is not installed")
    corpus = load_corpus(config.corpus, config.sequence + 1)
    if saved and saved["corpus"] != corpus.digest and "corpus" not in settings:
        raise ValueError(f"{out}: the corpus has changed since this run began; name it to go on with another")
    if saved and saved["step"] > config.steps:
        raise ValueError(f"{out}: the run is at step {saved['step']}, past steps={config.steps}")
    return Plan(config, decoder, policy, corpus, world, device, out, start, placed)


def _place(config: TrainConfig, decoder: DecoderConfig, world: World, device: torch.device) -> Partition:
    """The layers of each stage, by the formulas of what they cost."""
    name = schedule_name(config.schedule)
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
    return partition(costs, stages, name, microbatches=config.parts, chunks=chunks)


def config_with_capacity(config: TrainConfig, rows: int) -> DecoderConfig:
    """The model with expert buffers of `rows` rows."""
    return merge(config.to_json(), {"model": {"capacity": rows}}).decoder()


def _start(out: Path, resume: bool) -> Path | None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: it is a file")
    if not resume:
        if any((out / name).exists() for name in (METRICS, checkpoint.FOLDER)):
            raise ValueError(f"--out {out} holds another run; --resume goes on with it")
        return None
    if not out.is_dir():
        raise ValueError(f"--resume: there is no run in {out}")
    return checkpoint.latest(out)


def _device(name: str, world: World) -> torch.device:
    device = find_device(name, f"device={name!r}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", world.local)
    return device
