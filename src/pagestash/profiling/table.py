"""Profiles as rich tables. (rich is imported when there is one: its import draws from Python's generator.)"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagestash.policy import Policy, Rule
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import HomeEstimate, Region, SavedTensor
from pagestash.profiling.regions import estimate, hidden_bytes
from pagestash.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

MODEL = "(model)"
"""What is saved outside all submodules."""
LARGEST = "◀"
"""Marks the region with the most bytes."""
LEAST_SECONDS = 5e-6
"""Regions that saved nothing and took less time are omitted."""


@dataclass(slots=True)
class Group:
    """Regions that share a row of the table."""

    name: str
    regions: list[Region] = field(default_factory=list)
    tensors: list[SavedTensor] = field(default_factory=list)
    homes: dict[str, int] = field(default_factory=dict)
    """Counted bytes by home under the profile's policy."""

    @property
    def bytes(self) -> int:
        return sum(tensor.counted for tensor in self.tensors)

    hiding: tuple[float, float] = (0.0, 0.0)
    """Seconds of forward and backward that its copies can hide behind; each region that ran counts once."""

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of forward and backward, without inner regions."""
        return _seconds(self.regions)


def label(name: str, *, depth: int | None = None, layers: bool = False) -> str:
    """The row that a region belongs to: `layers.3.attn` is in `layers.*.attn`.

    >>> label("layers.3.attn.core", depth=3)
    'layers.*.attn'
    """
    parts = name.split(".")[:depth]
    if not layers:
        parts = [re.sub(r"^\d+$", "*", part) for part in parts]
    return ".".join(parts) or MODEL


def groups(profile: ProfiledStep, *, depth: int | None = None, layers: bool = False) -> list[Group]:
    """Regions by row, in the order in which they started."""
    found: dict[str, Group] = {}
    for region in profile.regions:
        name = label(region.name, depth=depth, layers=layers)
        found.setdefault(name, Group(name)).regions.append(region)
    for tensor, home in zip(profile.tensors, profile.homes()):
        group = found[label(tensor.region, depth=depth, layers=layers)]
        group.tensors.append(tensor)
        group.homes[home] = group.homes.get(home, 0) + tensor.counted
    by_name = {region.name: region for region in profile.regions}
    for group in found.values():
        ran = dict.fromkeys(region.within for region in group.regions)
        group.hiding = _seconds([by_name[name] for name in ran])
    return list(found.values())


def region_table(
    profile: ProfiledStep, *, depth: int | None = None, layers: bool = False, narrow: bool = False
) -> "Table":
    """One row for each region, or for each of their groups; the one with the most bytes is marked.

    `narrow` fits 80 columns: milliseconds in one sum, and the bytes that offload and recompute would save; under a
    policy, the home of a region instead.
    """
    from rich import box
    from rich.table import Table

    if depth is not None and depth < 1:
        raise ValueError(f"depth={depth}: expected at least 1")
    table = Table(
        title="saved for backward, by region",
        caption=_caption(profile, narrow=narrow),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if narrow else (0, 1),
    )
    table.add_column("region", overflow="fold", no_wrap=not narrow)
    headings = ["bytes", "ms"] if narrow else ["bytes", "fwd / bwd ms", "link hides"]
    homes = ["offload", "recompute"] if narrow else ["stash", "offload", "recompute"]
    if narrow and profile.policy is not None:
        homes = []
    for heading in (*headings, *homes):
        table.add_column(heading, justify="right", no_wrap=True)
    if profile.policy is not None:
        table.add_column("home")
    found = groups(profile, depth=depth, layers=layers)
    most = max(group.bytes for group in found) if found else 0
    for group in found:
        if not group.bytes and sum(group.seconds) < LEAST_SECONDS:
            continue
        estimates: dict[str, HomeEstimate | None] = {
            **estimate(group.tensors, *group.hiding, profile.link),
            "recompute": _recompute(group, layers=layers),
        }
        alike = sum(label(region.name, layers=layers) == group.name for region in group.regions)
        times = f"  ×{alike}" if alike > 1 else ""
        largest = 0 < most == group.bytes
        row = [
            group.name + times,
            format_bytes(group.bytes) + (f" {LARGEST}" if largest else ""),
            *_times(profile, group.seconds, group.hiding, narrow=narrow),
            *(_estimate(estimates[home], narrow=narrow) for home in homes),
        ]
        if profile.policy is not None:
            row.append(", ".join(home for home, size in group.homes.items() if size))
        table.add_row(*row, style="bold" if largest else None)
    table.add_section()
    both = profile.forward_seconds, profile.backward_seconds
    table.add_row("together", format_bytes(profile.total_bytes), *_times(profile, both, both, narrow=narrow))
    return table


def tensor_table(profile: ProfiledStep, match: str = "**") -> "Table":
    """One row for each saved tensor of the regions that `match` names."""
    from rich import box
    from rich.table import Table

    names = dict.fromkeys(tensor.region for tensor in profile.tensors)
    if match != "**":  # also matches the model itself
        Policy([Rule(match, "keep")]).check(names)
    table = Table(title="saved tensors", box=box.SIMPLE_HEAD)
    for heading in ("region", "shape", "dtype", "kind"):
        table.add_column(heading, no_wrap=heading != "shape")
    for heading in ("bytes", "counted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("also held by")
    if profile.policy is not None:
        table.add_column("home")
    rule = Rule(match, "keep")
    for tensor, home in zip(profile.tensors, profile.homes()):
        if not rule.matches(tensor.region):
            continue
        row = [
            tensor.region or MODEL,
            " × ".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            tensor.kind.replace("_", " "),
            format_bytes(tensor.bytes),
            format_bytes(tensor.counted) if tensor.counted else "–",
            ", ".join(tensor.held_by),
        ]
        if profile.policy is not None:
            row.append(home if tensor.counted else "")
        table.add_row(*row)
    return table


def _seconds(regions: Sequence[Region]) -> tuple[float, float]:
    forward = sum(region.forward_seconds for region in regions)
    return forward, sum(region.backward_seconds for region in regions)


def _recompute(group: Group, *, layers: bool) -> HomeEstimate | None:
    """The estimate of the regions that the row is named after; inner ones would count twice."""
    whole = [
        region.homes["recompute"]
        for region in group.regions
        if "recompute" in region.homes and label(region.name, layers=layers) == group.name
    ]
    if not whole:
        return None
    return HomeEstimate(sum(item.saved_bytes for item in whole), sum(item.seconds for item in whole))


def _times(
    profile: ProfiledStep, seconds: tuple[float, float], hiding: tuple[float, float], *, narrow: bool
) -> list[str]:
    """Milliseconds of forward and backward, and what the link could hide behind `hiding` where there is room."""
    if narrow:
        return [_milliseconds(sum(seconds))]
    return [" / ".join(map(_milliseconds, seconds)), format_bytes(hidden_bytes(*hiding, profile.link))]


def _estimate(found: HomeEstimate | None, *, narrow: bool) -> str:
    if found is None or not found.saved_bytes:
        return "–"
    size = format_bytes(found.saved_bytes)
    return size if narrow else f"{size} / {_milliseconds(found.seconds)} ms"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _caption(profile: ProfiledStep, *, narrow: bool) -> str:
    link = profile.link
    source = "measured" if link.measured else "assumed"
    costs = "" if narrow else ", and milliseconds that this costs a step"
    lines = [
        f"{LARGEST} the most. Homes: bytes saved{costs}. Times and bytes are a region's own; recompute is for all "
        "that is inside it.",
        f"Link {source}: {link.out / 1e9:.1f} GB/s out, {link.back / 1e9:.1f} GB/s back.",
    ]
    others = _others(profile)
    if others:
        lines.append(f"Not counted: {others}.")
    if profile.allocated_bytes is not None:
        lines.append(f"The allocator counts {format_bytes(profile.allocated_bytes)}.")
    if profile.policy is not None:
        sums = (f"{home} {format_bytes(size)}" for home, size in profile.home_bytes().items() if size)
        lines.append(f"Under the policy: {', '.join(sums)}.")
    return "\n".join(lines)


def _others(profile: ProfiledStep) -> str:
    shared: Sequence[tuple[str, int]] = [
        ("weights", _size(profile, "weight", "weight_view")),
        ("buffers", _size(profile, "buffer")),
        ("the batch", _size(profile, "input")),
    ]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in shared if size)


def _size(profile: ProfiledStep, *kinds: str) -> int:
    return sum({t.storage: t.storage_bytes for t in profile.tensors if t.kind in kinds}.values())
