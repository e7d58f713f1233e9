"""The settings of a training run. The command line overrides a TOML file, which overrides the defaults."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pagestash import toml
from pagestash.models.config import DecoderConfig, preset


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A run of `pagestash train`. Fields before `policy` affect losses and weights; the others do not."""

    preset: str = "tiny"
    layers: int | None = None
    """Cut the preset to this many layers."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the preset to change; the vocabulary is 256 bytes unless it is among them."""
    seed: int = 0
    corpus: tuple[str, ...] = ()
    """Files and folders of text; empty: the source of Python's standard library."""
    batch: int = 4
    """Sequences per step and rank."""
    sequence: int = 128
    microbatches: int = 0
    """Parts that a rank's sequences are divided into; 0: one part, or with a pipeline one per sequence. The loss is
    the mean over all parts; auxiliary losses are computed per part."""

    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup: int = 10
    decay_steps: int = 2000
    """The step at which the cosine reaches `min_lr`. It does not depend on `steps`, so that extending a run gives
    bit-identical results."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """The norm that gradients are clipped to; 0: no clipping."""
    bias_rate: float = 1e-3
    """How far the routers' selection biases move per step, if the model has them."""
    capacity_factor: float = 0.0
    """Rows of a layer's expert buffers, as a multiple of the average number received; 0: the worst case."""
    expert_parallel: int = 0
    """Ranks that a layer's experts are divided among; 0: all. Groups of such ranks are data parallel."""
    dispatch: str = "all_gather"
    """How rows reach the ranks of their experts: all_gather, all_to_all, all_to_all_exact."""
    shard: bool = True
    """Whether FSDP2 shards what several ranks hold in common. Without it each of them has all of it, and on GPUs
    the step is a CUDA graph, collectives included."""
    pipeline: int = 1
    """Ranks that the layers are divided among; `schedule` determines each rank's stages."""
    schedule: str = "1F1B"
    """With a pipeline: a schedule of torch.distributed.pipelining."""
    chunks: int = 0
    """With a pipeline: stages per rank, if the schedule leaves the choice; 0: 2."""
    deterministic: bool = True
    """On a GPU: sum in a fixed order, so that two runs are bit-identical (matters for attention's backward)."""

    policy: str = "none"
    """A policy file, or none."""
    steps: int = 200
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 0
    """Steps between reads of the results; 0: 1 on a CPU, 10 on a GPU. Every step has a line in the metrics."""
    tensorboard: bool = False
    device: str = "auto"
    overlap: bool = False
    """Whether a microbatch's backward and another's forward run as a pair, the exchanges of each with other ranks
    under the compute of the other. Without a pipeline not with `shard`."""
    graph: bool = True
    """Whether a step on a GPU is a CUDA graph; with several ranks, if `shard` is off and there is no pipeline."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                bound = f"at most {high}" if value > high else f"at least {low}"
                raise ValueError(f"{name}={value}: expected {bound}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0 and less than 1")
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch={self.dispatch!r}: expected one of {', '.join(DISPATCHES)}")
        if self.batch % self.parts:
            raise ValueError(f"microbatches={self.parts} do not divide batch={self.batch}")

    @property
    def parts(self) -> int:
        """Microbatches per step."""
        return self.microbatches or (self.batch if self.pipeline > 1 else 1)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.batch // self.parts * self.sequence

    def decoder(self) -> DecoderConfig:
        """The model that is trained."""
        return preset(self.preset, self.layers, **{"vocab": 256, **self.model})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_COUNT, _FINITE = 2**31 - 1, sys.float_info.max
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("steps", "batch", "sequence", "decay_steps", "keep_checkpoints", "pipeline"), (1, _COUNT)
    ),
    **dict.fromkeys(("warmup", "checkpoint_every", "log_every", "expert_parallel"), (0, _COUNT)),
    **dict.fromkeys(("microbatches", "chunks"), (0, _COUNT)),
    **dict.fromkeys(("lr", "min_lr", "weight_decay", "bias_rate", "clip"), (0, _FINITE)),
    "capacity_factor": (0, 1e6),
    "seed": (0, 2**63 - 1),
}
"""The smallest and largest value of each setting; the comparison also rejects NaN and infinity."""

DISPATCHES = ("all_gather", "all_to_all", "all_to_all_exact")


def merge(*layers: Mapping[str, Any]) -> TrainConfig:
    """One configuration from several sources; later ones win, and `model` merges by key."""
    values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key == "model":
                value = {**values.get("model", {}), **value}
            values[key] = value
    return TrainConfig(**values)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file; an error names the setting and the file."""
    values = toml.read_toml(path)
    try:
        return checked(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """The settings in `key=value` words; `model.key=value` sets a field of the model.

    >>> parse_assignments(["lr=1e-3", "model.experts=4"])
    {'lr': 0.001, 'model': {'experts': 4}}
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: expected key=value")
        value = _value(text.strip())
        table, dot, inner = key.strip().partition(".")
        if dot and table == "model":
            values.setdefault("model", {})[inner] = value
        else:
            values[key.strip()] = value
    return checked(values)


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, each with a known name and the right type."""
    settings = _check_table(values, TrainConfig, "")
    if not isinstance(settings.get("model", {}), Mapping):
        raise ValueError(f"model={settings['model']!r}: expected a table")
    if "layers" in settings.get("model", {}):
        raise ValueError("model.layers: set layers instead, which keeps a layer with experts")
    if "model" in settings:
        settings["model"] = _check_table(settings["model"], DecoderConfig, "model.")
    return settings


def _check_table(values: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    types = {item.name: item.type for item in fields(kind)}
    result = {}
    for key, value in values.items():
        if key not in types:
            near = get_close_matches(key, types, n=1)
            meant = f"; did you mean {where}{near[0]}?" if near else f"; expected one of {', '.join(types)}"
            raise ValueError(f"unknown key {where}{key}{meant}")
        result[key] = _check_type(value, types[key], f"{where}{key}")
    return result


def _check_type(value: Any, kind: Any, name: str) -> Any:
    """`value` as `kind`; accepts whole numbers as floats, and a string as a tuple of one."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):  # which are one from Python 3.14 on
        parts = get_args(kind)
        words = [word for part in parts for word in get_args(part)]
        if (value is None and NoneType in parts) or (isinstance(value, str) and value in words):
            return value
        kind = next(part for part in parts if part is not NoneType and get_origin(part) is None)
    elif origin is tuple:
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, Sequence) or not all(isinstance(part, str) for part in many):
            raise ValueError(f"{name}={value!r}: expected a list of strings")
        return tuple(many)
    elif origin is Mapping:
        return value
    elif origin is not None:  # a literal: the class checks its values
        kind = str
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise ValueError(f"{name} is too large a number")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name}={value!r}: expected {_NAMES[kind]}")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _value(text: str) -> Any:
    """The text parsed as a TOML value, or the text itself: paths and names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
