"""Pictures of a plan: step time over memory, and memory over the step before and after."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pagestash.planning.budget import HELD_BY
from pagestash.planning.prediction import Prediction
from pagestash.profiling.picture import FAINT, INK, byte_unit, new_figure, tidy
from pagestash.sizes import format_bytes

# Okabe and Ito's colours, which colour-blind readers tell apart; greys for what no policy changes.
BLUE, ORANGE, GREEN, RED, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9"
POINTS = {"keep all": ("s", INK), "recompute layers": ("^", GREEN), "offload all": ("D", ORANGE)}
"""Marker and colour of each alternative."""
STACK = {
    "base": "#d3d8df",
    "other": "#a3adba",
    "keep": BLUE,
    "stash": SKY,
    "offload": ORANGE,
    "recompute": GREEN,
}
"""What holds device memory, from the bottom, and its colour."""
DASHES = (0, (4, 3))
MOST_BASE = 0.5
"""If more of the peak never changes, the axis of memory does not begin at 0."""
FINEST = 1000
"""A step in the picture is at least this part of it long."""


def draw_curve(
    *,
    curve: Sequence[tuple[int, float]],
    alternatives: Mapping[str, Prediction],
    chosen: Prediction,
    budget_bytes: int,
) -> Any:
    """A line: the fastest plan's predicted time for every budget. Points: the alternatives, and the chosen plan."""
    figure = new_figure(4.4)
    axis = figure.subplots()
    sizes = [size for size, _ in curve] + [item.peak_bytes for item in (*alternatives.values(), chosen)]
    unit, divisor = byte_unit(max(sizes))
    low, high = min(sizes) / divisor, max(*sizes, _shown(budget_bytes, max(sizes))) / divisor
    room = 0.06 * (high - low) or 0.1 * high
    axis.set_xlim(low - room, high + room)
    if curve:
        _staircase(axis, [(size / divisor, 1e3 * seconds) for size, seconds in reversed(curve)])
    points = [(name, item, *POINTS[name], 55) for name, item in alternatives.items()]
    # The plan's mark is larger, and behind: it may be one of the alternatives.
    for name, item, marker, colour, area in (*points, ("this plan", chosen, "*", RED, 260)):
        axis.scatter(
            [item.peak_bytes / divisor],
            [1e3 * item.seconds],
            label=f"{name}: {format_bytes(item.peak_bytes)}, {1e3 * item.seconds:.1f} ms",
            marker=marker,
            color=colour,
            s=area,
            zorder=4 if name in POINTS else 3,
        )
    axis.axvline(
        budget_bytes / divisor, color=RED, linewidth=1.2, linestyle=DASHES, label=_budget(budget_bytes)
    )
    axis.margins(y=0.12)
    axis.set_xlabel(f"device memory at the peak of the step, {unit}")
    axis.set_ylabel("predicted step, ms")
    tidy(axis)
    keep = 1e3 * alternatives["keep all"].seconds
    ratio = axis.secondary_yaxis("right", functions=(lambda ms: ms / keep, lambda part: part * keep))
    ratio.set_ylabel("relative to keep all")
    ratio.spines["right"].set_visible(False)
    _legend(figure, axis)
    return figure


def _staircase(axis: Any, ascending: Sequence[tuple[float, float]]) -> None:
    """From each plan's peak up to that of the next faster one, its time is the best."""
    left, right = axis.get_xlim()
    sizes, times = zip(*ascending, (right, ascending[-1][1]))
    axis.step(sizes, times, where="post", color=BLUE, linewidth=1.8, label="fastest plan for each budget")
    axis.axvspan(left, sizes[0], color="#f0f1f4", zorder=0)
    across = axis.get_xaxis_transform()
    style = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 9, "color": FAINT}
    axis.text((left + sizes[0]) / 2, 0.5, "nothing fits", transform=across, **style)


def draw_memory(*, before: Prediction, after: Prediction, budget_bytes: int, turn: int) -> Any:
    """What holds device memory over the step: without a policy, and below it as planned, if that is another step.

    Backward begins in segment `turn`.
    """
    panels = {"without a policy": before} | ({} if after is before else {"planned": after})
    figure = new_figure(0.8 + 2.5 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    peak = max(before.peak_bytes, after.peak_bytes)
    unit, divisor = byte_unit(peak)
    top = max(peak, _shown(budget_bytes, peak)) / divisor
    base = min(before.memory["base"]) / divisor
    bottom = base - 0.15 * (top - base) if base > MOST_BASE * top else 0.0
    names = {name: HELD_BY[name] for name in STACK if any(before.memory[name]) or any(after.memory[name])}
    if bottom:
        names["base"] += f": {format_bytes(round(base * divisor))}, not shown whole"
    for axis, (what, item) in zip(axes, panels.items()):
        _stack(axis, item, names, divisor, bottom)
        _mark_turn(axis, 1e3 * [*item.starts, item.seconds][turn])
        axis.axhline(
            budget_bytes / divisor, color=RED, linewidth=1.4, linestyle=DASHES, label=_budget(budget_bytes)
        )
        heading = f"{what}: {format_bytes(item.peak_bytes)} at the peak, {1e3 * item.seconds:.1f} ms"
        axis.set_title(heading, loc="left", fontsize=10.5, color=INK)
        axis.set_ylabel(f"device memory, {unit}")
        tidy(axis)
    axes[0].set_ylim(bottom, top + 0.15 * (top - bottom))
    axes[0].set_xlim(0, 1e3 * max(before.seconds, after.seconds) or 1.0)
    axes[-1].set_xlabel("time of the step, ms")
    _legend(figure, axes[0])
    return figure


def _stack(axis: Any, item: Prediction, names: Mapping[str, str], divisor: int, bottom: float) -> None:
    """Each part is drawn behind the ones below it, from the bottom up to the sum."""
    edges, columns = _visible(item, list(names))
    for order, (name, total) in enumerate(zip(names, zip(*columns))):
        axis.stairs(
            [size / divisor for size in total],
            edges,
            baseline=bottom,
            fill=True,
            color=STACK[name],
            label=names[name],
            zorder=1.9 - 0.1 * order,
        )


def _visible(item: Prediction, names: Sequence[str]) -> tuple[list[float], list[list[int]]]:
    """Edges in ms, and between them the running sums of the parts.

    Segments too short to see are joined, with the most bytes of any of them: a real step has hundreds.
    """
    ends = [*item.starts[1:], item.seconds]
    edges, columns = [0.0], []
    joined = [0] * len(names)
    for at, end in enumerate(ends):
        joined = list(map(max, joined, accumulate(item.memory[name][at] for name in names)))
        if 1e3 * end - edges[-1] >= 1e3 * item.seconds / FINEST or at + 1 == len(ends):
            edges.append(1e3 * end)
            columns.append(joined)
            joined = [0] * len(names)
    return edges, columns


def _mark_turn(axis: Any, at: float) -> None:
    axis.axvline(at, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    place = {"xy": (at, 1), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    for text, side, points in (("forward", "right", -5), ("backward", "left", 5)):
        axis.annotate(text, **place, xytext=(points, -3), ha=side, va="top", fontsize=9, color=INK)


def _shown(budget_bytes: int, peak: int) -> int:
    """The budget if it is near enough to be in the picture."""
    return budget_bytes if budget_bytes <= 1.25 * peak else 0


def _budget(budget_bytes: int) -> str:
    return f"budget: {format_bytes(budget_bytes)}"


def _legend(figure: Any, axis: Any) -> None:
    """Below the picture, where it hides nothing, in as many columns as there is room for."""
    handles, labels = axis.get_legend_handles_labels()
    style = {"loc": "outside lower left", "frameon": False, "fontsize": 9, "labelcolor": INK}
    for columns in (3, 2, 1):
        legend = figure.legend(handles, labels, ncols=columns, **style)
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        if columns > 1:
            legend.remove()
