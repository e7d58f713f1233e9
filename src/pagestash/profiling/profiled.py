"""The numbers of a profiled step, in memory and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints

from pagestash.policy import HOMES, HomeName, Policy, Rule
from pagestash.profiling.assign import Recomputing, TensorIndex, assign, assign_when_saved
from pagestash.profiling.fit import Fit, fit
from pagestash.profiling.from_json import convert, load, read_list
from pagestash.profiling.link import Link
from pagestash.profiling.overhead import Overhead
from pagestash.profiling.records import Gradients, Kind, Region, SavedTensor, Segment

FORMAT = 2
"""Version of the JSON format; other versions are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One profiled step: its saved tensors, its regions, and its segments in time."""

    device: str
    link: Link
    tensors: list[SavedTensor]
    regions: list[Region]
    segments: list[Segment]
    plain_seconds: float
    """The unobserved step, until the device is done. On a GPU the segments' sum is smaller if the step is bound by
    launches; on a CPU it is larger by the cost of observing."""
    loop_seconds: float | None = None
    """On a GPU: the same, if steps follow each other and the host waits for none."""
    host_waits: bool = False
    """On a GPU: whether the step itself makes the host wait for the device, so that it is never a step ahead."""
    allocated_bytes: int | None = None
    """On a GPU: the bytes that forward left allocated, without the model's output."""
    policy: Policy | None = None
    model_bytes: int
    """Parameters and buffers on the device."""
    gradient_bytes: int
    """Gradients of all parameters that require one."""
    parameter_bytes: dict[str, int] = field(default_factory=dict)
    """Of each module's own parameters, by its name, in the model's order; empty for a part of a pipeline."""
    gradients: Gradients = "held"
    """Whether the step found them in place."""
    other_bytes: int | None = None
    """On a GPU: what was allocated before the step and not by the model, such as libraries' workspace."""
    recomputed_layers: int = 0
    """So many layers were recomputed while it was measured; the profile is of the step that keeps all."""
    overhead: Overhead | None = None
    """What a keeper costs the host; None on a CPU."""

    # --- sums ---

    @property
    def total_bytes(self) -> int:
        """Bytes that the step allocates and holds for backward, each storage once; no weights, no batch."""
        return sum(tensor.counted for tensor in self.tensors)

    def bytes_of(self, kind: Kind) -> int:
        """Storage bytes of all saved tensors of one kind, each storage once."""
        sizes = {tensor.storage: tensor.storage_bytes for tensor in self.tensors if tensor.kind == kind}
        return sum(sizes.values())

    @property
    def forward_seconds(self) -> float:
        return sum(segment.seconds for segment in self.segments if segment.way == "forward")

    @property
    def backward_seconds(self) -> float:
        return sum(segment.seconds for segment in self.segments if segment.way == "backward")

    def region(self, name: str) -> Region:
        """The region of that name."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    # --- policies ---

    def homes(self, policy: Policy | None = None) -> list[HomeName]:
        """The home that a policy (default: the profile's) gives each tensor, in their order."""
        return assign(policy or self.policy or Policy(), self.tensors, self.regions)

    def home_bytes(self, policy: Policy | None = None) -> dict[HomeName, int]:
        """Counted bytes by home."""
        if policy is not None:
            policy.refuse_bits("home_bytes")
        sums: dict[HomeName, int] = dict.fromkeys(HOMES, 0)
        for tensor, home in zip(self.tensors, self.homes(policy)):
            sums[home] += tensor.counted
        return sums

    def fits(self, policy: Policy | str, *, min_bytes: int | None = None) -> Fit:
        """Whether the copies of a policy's offload hide behind compute; a pattern is short for an offload rule.

        The step is simulated by the keeper's own rules, so `moved_bytes` is what a keeper copies. That includes a
        tensor that a later region keeps: the keeper decides when a tensor is saved (`home_bytes` says `keep`).
        `unmoved` says of each rule that moves nothing why. Assumes that nothing else uses the link, and that
        recomputation takes no time.
        """
        if isinstance(policy, str):
            policy = Policy([Rule(policy, "offload", min_bytes=min_bytes)])
        policy.refuse_bits("fits")
        policy.check(region.name for region in self.regions)
        index = TensorIndex(self.tensors)
        homes = assign_when_saved(policy, index, Recomputing(policy, index, self.regions))
        return fit(policy, index, homes, self.segments, self.link)

    # --- JSON ---

    def to_json(self) -> str:
        """All data, with the sums first; `load` reads it back to an equal profile."""
        data = {
            "format": FORMAT,
            "device": self.device,
            "total_bytes": self.total_bytes,
            "allocated_bytes": self.allocated_bytes,
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "plain_seconds": self.plain_seconds,
            "loop_seconds": self.loop_seconds,
            "host_waits": self.host_waits,
            "model_bytes": self.model_bytes,
            "gradient_bytes": self.gradient_bytes,
            "parameter_bytes": self.parameter_bytes,
            "gradients": self.gradients,
            "other_bytes": self.other_bytes,
            "recomputed_layers": self.recomputed_layers,
            "overhead": None if self.overhead is None else asdict(self.overhead),
            "home_bytes": self.home_bytes(),
            "policy": None if self.policy is None else self.policy.to_toml(),
            "link": asdict(self.link),
            "regions": [asdict(region) for region in self.regions],
            "tensors": [{**asdict(tensor), "home": home} for tensor, home in zip(self.tensors, self.homes())],
            "segments": [asdict(segment) for segment in self.segments],
        }
        return json.dumps(data, indent=1)

    def save(self, path: str | Path) -> None:
        """Write `to_json()` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        return load(path, "profile", FORMAT, cls._of)

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Self:
        hints = get_type_hints(ProfiledStep)
        missing = hints.keys() - data.keys()
        if missing:
            raise ValueError(f"this profile has no {min(missing)!r}")
        others = hints.keys() - {"tensors", "regions", "segments"}
        plain = {name: convert(hints[name], data[name], name) for name in sorted(others)}
        regions = read_list(Region, data["regions"], "regions")
        for at, region in enumerate(regions):
            for home in ("keep", "stash", "offload"):
                if home not in region.homes:
                    raise ValueError(f"regions[{at}].homes has no {home!r}")
        return cls(
            **plain,
            tensors=read_list(SavedTensor, data["tensors"], "tensors", leave="home"),
            regions=regions,
            segments=read_list(Segment, data["segments"], "segments"),
        )
