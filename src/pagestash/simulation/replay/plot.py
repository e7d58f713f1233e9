"""A picture of a replayed step: what each rank does over time, and beneath it the memory that each one holds.

A rank has four lanes from the top: compute, communication of experts' rows, copies to the host, copies back.
"""

from collections.abc import Sequence
from typing import Any

from pagestash.profiling.picture import FAINT, INK, byte_unit, new_figure, tidy
from pagestash.simulation.replay.played import RankReplay, Replay
from pagestash.simulation.replay.programs import COMMUNICATION
from pagestash.sizes import format_bytes

# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "weight": "#009e73",
    "recompute": "#0072b2",
    "stash": "#f0e442",
    "wait": "#d55e00",
    "optimizer": "#22272e",
    "communication": "#cc79a7",
    "out": "#4f6d8f",
    "back": "#9fb6cd",
}
LABELS = {
    "weight": "weight gradient",
    "stash": "stash copy",
    "wait": "wait for a copy",
    "optimizer": "gradient reduction, optimizer",
    "communication": "dispatch, combine, gather",
    "out": "copy to the host",
    "back": "copy back",
}
LANES = {"communication": (0.30, 0.14), "out": (0.16, 0.12), "back": (0.04, 0.12)}
"""Bottom and height of each lane but compute, as parts of a rank's row."""
COMPUTE = (0.46, 0.44)
FINEST = 2000
"""Gaps shorter than this part of what is shown are closed: nobody could see them."""
MOST_ACTIONS = 400
"""With more actions, a part of the step is shown enlarged beneath the whole."""
SHOWN = 24
"""Actions of a rank in the enlarged part."""

Interval = tuple[float, float]


def draw_step(step: Replay, *, title: str = "", capacity_bytes: int = 0) -> Any:
    """The figure; `capacity_bytes` is the memory of a device."""
    ranks, actions = len(step.ranks), max(len(rank.plan.actions) for rank in step.ranks)
    heights = [0.42 * ranks + 0.3, 2.0]
    enlarged = actions * ranks > MOST_ACTIONS
    if enlarged:
        heights.insert(1, 0.52 * ranks + 0.3)
    figure = new_figure(1.7 + sum(heights), 11.0)
    whole, *zoom, memory = figure.subplots(len(heights), 1, height_ratios=heights)
    unit, divisor = ("ms", 1e3) if step.seconds < 10 else ("s", 1.0)
    drawn = _draw_ranks(whole, step, (0.0, step.seconds), divisor)
    for axis in zoom:
        middle, half = step.seconds / 2, step.seconds * SHOWN / actions / 2
        _draw_ranks(axis, step, (middle - half, middle + half), divisor)
        axis.set_title("enlarged", loc="left", fontsize=9.5, color=FAINT)
        edges = divisor * (middle - half), divisor * (middle + half)
        whole.axvspan(*edges, color=INK, alpha=0.12, linewidth=0)
    _draw_memory(memory, step, divisor, capacity_bytes)
    memory.set_xlim(whole.get_xlim())
    memory.set_xlabel(f"time of the step, {unit}")
    heading = f"{divisor * step.seconds:,.1f} {unit}, bubble {100 * step.bubble():.1f} %"
    figure.suptitle(f"{title}: {heading}" if title else heading, x=0.01, ha="left", fontsize=11.5, color=INK)
    _legend(figure, drawn, memory)
    return figure


def _draw_ranks(axis: Any, step: Replay, shown: Interval, divisor: float) -> set[str]:
    """A row for each rank; returns what was drawn."""
    ranks = len(step.ranks)
    drawn: set[str] = set()
    for number, rank in enumerate(step.ranks):
        drawn |= _draw_rank(axis, rank, ranks - 1 - number, shown, divisor)
    axis.set_ylim(0, ranks)
    axis.set_xlim(divisor * shown[0], divisor * shown[1] or 1.0)
    axis.set_yticks(
        [ranks - 0.5 - number for number in range(ranks)], [str(number) for number in range(ranks)]
    )
    axis.set_ylabel("pipeline rank", color=INK)
    axis.tick_params(left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    for number in range(1, ranks):
        axis.axhline(number, color="#e4e6ea", linewidth=0.6, zorder=0)
    return drawn


def _draw_rank(axis: Any, rank: RankReplay, bottom: int, shown: Interval, divisor: float) -> set[str]:
    """A bar for each piece, and the microbatch in each action that is wide enough."""
    width = shown[1] - shown[0]
    bars: dict[str, list[list[float]]] = {}
    actions: dict[tuple[str, int, int], list[float]] = {}
    for span in rank.spans:
        name = "communication" if span.kind in COMMUNICATION else span.kind
        if name == "send" or span.end <= max(span.start, shown[0]) or span.start >= shown[1]:
            continue
        if name in ("forward", "backward", "weight"):
            actions.setdefault((name, span.stage, span.microbatch), [span.start, span.end])[1] = span.end
        own = bars.setdefault(name, [])
        action = [span.stage, span.microbatch]
        # Neighbouring actions are told apart where they are wide enough to be seen.
        near = own and span.start - own[-1][1] <= width / FINEST
        if near and (own[-1][2:] == action or own[-1][1] - own[-1][0] <= width / FINEST):
            own[-1][1] = max(own[-1][1], span.end)
        else:
            own.append([span.start, span.end, *action])
    for name, found in bars.items():
        low, height = LANES.get(name, COMPUTE)
        places = [(divisor * start, divisor * end) for start, end, *_ in found]
        edges = name not in LANES and sum(end - start for start, end, *_ in found) > len(found) * width / 300
        axis.add_patch(_bars(places, bottom + low, height, COLOURS[name], edges=edges))
    for (_, _, microbatch), (start, end) in actions.items():
        middle = (start + end) / 2
        if end - start > width / 110 and shown[0] < middle < shown[1]:
            place = divisor * middle, bottom + COMPUTE[0] + COMPUTE[1] / 2
            text = {"ha": "center", "va": "center_baseline", "fontsize": 6.5, "color": INK}
            axis.text(*place, str(microbatch), **text)
    return set(bars)


def _bars(places: Sequence[Interval], low: float, height: float, colour: str, *, edges: bool) -> Any:
    """Many bars as one shape: a small file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = [
        corner
        for start, end in places
        for corner in ((start, low), (start, low + height), (end, low + height), (end, low), (start, low))
    ]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(places)
    edge = {"edgecolor": "white", "linewidth": 0.4} if edges else {"edgecolor": "none", "linewidth": 0.0}
    return PathPatch(Outline(corners, codes), facecolor=colour, **edge)


def _draw_memory(axis: Any, step: Replay, divisor: float, capacity_bytes: int) -> None:
    most = max(step.peak_bytes, 1)
    unit, size = byte_unit(most)
    ranks = len(step.ranks)
    for number, rank in enumerate(step.ranks):
        part = number / max(1, ranks - 1)
        times = [divisor * time for time, _ in rank.memory] + [divisor * step.seconds]
        levels = [held / size for _, held in rank.memory]
        axis.step(
            times,
            [*levels, levels[-1]],
            where="post",
            linewidth=1.1,
            color=(0.78 * part, 0.27 + 0.15 * part, 0.52 + 0.03 * part),
            label=f"rank {number}" if number in (0, ranks - 1) else None,
        )
    top = most
    if capacity_bytes and capacity_bytes < 2 * most:
        top = max(most, capacity_bytes)
        label = f"device memory {format_bytes(capacity_bytes)}"
        line = {"color": COLOURS["wait"], "linewidth": 1.2, "linestyle": (0, (4, 3)), "label": label}
        axis.axhline(capacity_bytes / size, **line)
    axis.set_ylim(0, 1.1 * top / size)
    axis.set_ylabel(f"allocated, {unit}", color=INK)
    tidy(axis)


def _legend(figure: Any, drawn: set[str], memory: Any) -> None:
    """Below the picture, where it hides nothing."""
    from matplotlib.patches import Patch

    kinds = [kind for kind in COLOURS if kind in drawn]
    handles: list[Any] = [Patch(facecolor=COLOURS[kind]) for kind in kinds]
    labels = [LABELS.get(kind, kind) for kind in kinds]
    lines, names = memory.get_legend_handles_labels()
    where = {"loc": "outside lower left", "ncols": 5, "frameon": False, "fontsize": 9, "labelcolor": FAINT}
    figure.legend([*handles, *lines], [*labels, *names], **where)
