"""The numbers of a profiled step, in memory and as JSON."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pagestash.policy import HOMES, HomeName, Policy, Rule
from pagestash.profiling.assign import assign
from pagestash.profiling.fit import Fit, fit
from pagestash.profiling.link import Link
from pagestash.profiling.records import HomeEstimate, Kind, Region, SavedTensor, Segment

FORMAT = 1
"""Of the JSON; another one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """Every tensor that one step saved for backward, its regions, and the step they belong to."""

    device: str
    link: Link
    tensors: list[SavedTensor]
    regions: list[Region]
    segments: list[Segment]
    plain_seconds: float
    """Forward and backward with nothing watched. On a GPU the segments' sum is less where launches take longer
    than computing, on a CPU it is more by what watching costs."""
    allocated_bytes: int | None = None
    """What forward left on a GPU by the allocator's own count, without the model's output."""
    policy: Policy | None = None

    # --- sums ---

    @property
    def total_bytes(self) -> int:
        """Bytes that the step took and holds for backward, each storage once; no weights, not the batch."""
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
        """The home that a policy (the profile's own, if none is given) gives each tensor, in their order."""
        return assign(policy or self.policy or Policy(), self.tensors, self.regions)

    def home_bytes(self, policy: Policy | None = None) -> dict[HomeName, int]:
        """Counted bytes by home."""
        sums: dict[HomeName, int] = dict.fromkeys(HOMES, 0)
        for tensor, home in zip(self.tensors, self.homes(policy)):
            sums[home] += tensor.counted
        return sums

    def fits(self, policy: Policy | str, *, min_bytes: int | None = None) -> Fit:
        """Whether what a policy offloads hides behind compute; a pattern stands for a rule that offloads it.

        It assumes that nothing else uses the link, and gives recomputation no time.
        """
        if isinstance(policy, str):
            policy = Policy([Rule(policy, "offload", min_bytes=min_bytes)])
        policy.check(region.name for region in self.regions)
        return fit(policy, self.tensors, self.homes(policy), self.segments, self.link)

    # --- JSON ---

    def to_json(self) -> str:
        """Everything, with the sums on top; `load` reads it back to an equal profile."""
        data = {
            "format": FORMAT,
            "device": self.device,
            "total_bytes": self.total_bytes,
            "allocated_bytes": self.allocated_bytes,
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "plain_seconds": self.plain_seconds,
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
        try:
            data = json.loads(Path(path).read_text())
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ValueError("this is no profile that this version can read")
            policy = data["policy"]
            return cls(
                device=data["device"],
                link=Link(**data["link"]),
                tensors=[SavedTensor(**_tuples(item, leave="home")) for item in data["tensors"]],
                regions=[_region(item) for item in data["regions"]],
                segments=[Segment(**_tuples(item)) for item in data["segments"]],
                plain_seconds=data["plain_seconds"],
                allocated_bytes=data["allocated_bytes"],
                policy=None if policy is None else Policy.from_dict(tomllib.loads(policy)),
            )
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error


def _tuples(item: Mapping[str, Any], leave: str = "") -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in item.items() if key != leave
    }


def _region(item: Mapping[str, Any]) -> Region:
    homes = {name: HomeEstimate(**values) for name, values in item["homes"].items()}
    return Region(**{**_tuples(item), "homes": homes})
