"""A picture of the step: saved bytes over time, stacked by region and by home."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from pagestash.policy import HOMES
from pagestash.profiling.levels import Levels
from pagestash.profiling.picture import byte_unit, new_figure, tidy, write
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.table import groups
from pagestash.sizes import format_bytes

SHOWN = 9
"""Regions with their own colour; the others share one."""
COLOURS = ["#3b6fb6", "#e08a3c", "#4c9f70", "#b65d8c", "#7a68b0", "#c9b13d", "#4aa5b5", "#c25b4e", "#8a6d4f"]
REST = "#b8bcc4"
HOME_COLOURS = {"keep": "#44546a", "stash": "#7f97b8", "offload": "#e3b778", "recompute": "#e4e6ea"}
WHERE = {
    "keep": "",
    "stash": " (valid rows, in pages)",
    "offload": " (host memory)",
    "recompute": " (dropped)",
}


def plot(profile: ProfiledStep, path: Path) -> None:
    """Write the picture to `path`; the suffix determines the format."""
    panels = 1 if profile.policy is None else 2
    figure = new_figure(4.6 * panels, 11)
    axes = figure.subplots(panels, 1, squeeze=False, sharex=True)[:, 0]
    _stack(axes[0], profile, *_by_region(profile), heading="region")
    if profile.policy is not None:
        _stack(axes[1], profile, *_by_home(profile), heading="home")
    axes[-1].set_xlabel("milliseconds of the step")
    figure.suptitle(_title(profile), x=0.01, ha="left", fontsize=12)
    write(figure, path, dpi=150)


def waiting(profile: ProfiledStep, chosen: Sequence[int], *, valid: bool = False) -> list[int]:
    """Counted bytes of the chosen tensors (by index) that are held at the end of each segment.

    With `valid`, only the bytes that backward reads.
    """
    found = Levels(len(profile.segments))
    for index in chosen:
        tensor = profile.tensors[index]
        size = min(tensor.counted, tensor.valid_bytes) if valid else tensor.counted
        found.add(tensor.saved_at, tensor.freed_at, size)
    return found.after()


Stacks = tuple[list[str], list[list[int]], list[str]]
"""Labels, bytes after each segment, colours."""


def _by_region(profile: ProfiledStep) -> Stacks:
    largest = sorted(groups(profile), key=lambda group: -group.bytes)
    shown = [group for group in largest[:SHOWN] if group.bytes]
    places = {id(tensor): index for index, tensor in enumerate(profile.tensors)}
    parts = [(group.name, [places[id(tensor)] for tensor in group.tensors]) for group in shown]
    colours = COLOURS[: len(parts)]
    rest = [places[id(tensor)] for group in largest[SHOWN:] for tensor in group.tensors]
    if any(profile.tensors[index].counted for index in rest):
        parts.append((f"{len(largest[SHOWN:])} others", rest))
        colours = [*colours, REST]
    return [name for name, _ in parts], [waiting(profile, chosen) for _, chosen in parts], colours


def _by_home(profile: ProfiledStep) -> Stacks:
    homes = profile.homes()
    parts = {
        home: waiting(
            profile, [index for index, found in enumerate(homes) if found == home], valid=home == "stash"
        )
        for home in HOMES
        if home in homes
    }
    parts = {home: sizes for home, sizes in parts.items() if any(sizes)}
    return (
        [home + WHERE[home] for home in parts],
        list(parts.values()),
        [HOME_COLOURS[home] for home in parts],
    )


def _stack(
    axis: Any,
    profile: ProfiledStep,
    labels: list[str],
    sizes: list[list[int]],
    colours: list[str],
    *,
    heading: str,
) -> None:
    unit, divisor = byte_unit(profile.total_bytes)
    ends = [0.0, *(1e3 * end for end in accumulate(segment.seconds for segment in profile.segments))]
    stacks = [[0.0, *(size / divisor for size in part)] for part in sizes]
    # Steps: a region's bytes appear, or are freed, when it ends.
    drawn = axis.stackplot(
        ends, stacks, labels=labels, colors=colours, step="post", linewidth=0.3, edgecolor="white"
    )
    turn = 1e3 * profile.forward_seconds
    axis.axvline(turn, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
    axis.set_xlim(0, ends[-1])
    top = max((sum(column) for column in zip(*stacks)), default=0.0) * 1.12 or 1.0
    axis.set_ylim(0, top)
    for text, place, side in (("forward ", turn, "right"), (" backward", turn, "left")):
        axis.text(place, 0.99 * top, text, ha=side, va="top", fontsize=9, color="#333333")
    axis.set_ylabel(unit)
    tidy(axis)
    # The legend has the order of the stack, from top to bottom.
    axis.legend(
        drawn[::-1],
        labels[::-1],
        title=heading,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8.5,
        title_fontsize=9,
        alignment="left",
    )


def _title(profile: ProfiledStep) -> str:
    total = format_bytes(profile.total_bytes)
    return f"Bytes that wait for backward: {total} at the end of forward, on {profile.device}"
