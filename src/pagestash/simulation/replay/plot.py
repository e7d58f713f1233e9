"""A picture of a replayed step: what each rank does over time, and beneath it the memory that each one holds.

A rank has four lanes from the top: compute, communication of experts' rows, copies to the host, copies back.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

from pagestash.profiling.picture import FAINT, INK, byte_unit, new_figure, tidy
from pagestash.simulation.replay.played import RankReplay, Replay, Span
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
FINEST = 3000
"""Gaps shorter than this part of what is shown are closed: nobody could see them."""
MOST_ACTIONS = 400
"""With more actions, a part of the step is shown enlarged beneath the whole."""
BINS = 240
SHADES = 5
SHOWN = 24
"""Actions of a rank in the enlarged part."""


def draw_step(step: Replay, *, title: str = "", capacity_bytes: int = 0) -> Any:
    """The figure; `capacity_bytes` is the memory of a device."""
    ranks = len(step.ranks)
    enlarged = _enlarged(step)
    heights = [0.42 * ranks + 0.3, *([0.52 * ranks + 0.3] if enlarged else []), 2.0]
    figure = new_figure(1.7 + sum(heights), 11.0)
    whole, *zoom, memory = figure.subplots(len(heights), 1, height_ratios=heights)
    unit, divisor = ("ms", 1e3) if step.seconds < 10 else ("s", 1.0)
    drawn = _draw_ranks(whole, step, (0.0, step.seconds), divisor, shares=enlarged is not None)
    for axis in zoom:
        if enlarged is not None:
            _draw_ranks(axis, step, enlarged, divisor, shares=False)
            axis.set_title("enlarged", loc="left", fontsize=9.5, color=FAINT)
            whole.axvspan(*(divisor * time for time in enlarged), color=INK, alpha=0.12, linewidth=0)
            told = f"the whole step: shares of each of {BINS} intervals"
            whole.set_title(told, loc="left", fontsize=9.5, color=FAINT)
    _draw_memory(memory, step, divisor, capacity_bytes)
    memory.set_xlim(whole.get_xlim())
    memory.set_xlabel(f"time of the step, {unit}")
    heading = f"{divisor * step.seconds:,.1f} {unit}, bubble {100 * step.bubble():.1f} %"
    figure.suptitle(f"{title}: {heading}" if title else heading, x=0.01, ha="left", fontsize=11.5, color=INK)
    _legend(figure, drawn, memory)
    return figure


def _enlarged(step: Replay) -> tuple[float, float] | None:
    """The middle of a step that has too many actions to be told apart."""
    actions = max(len(rank.plan.actions) for rank in step.ranks)
    if actions * len(step.ranks) <= MOST_ACTIONS:
        return None
    half = step.seconds * SHOWN / actions / 2
    return step.seconds / 2 - half, step.seconds / 2 + half


def _draw_ranks(
    axis: Any, step: Replay, shown: tuple[float, float], divisor: float, *, shares: bool
) -> set[str]:
    """A row for each rank; returns what was drawn."""
    ranks = len(step.ranks)
    drawn: set[str] = set()
    for number, rank in enumerate(step.ranks):
        draw = _draw_shares if shares else _draw_rank
        drawn |= draw(axis, rank, ranks - 1 - number, shown, divisor)
    if not shares:
        _draw_numbers(axis, step, shown, divisor)
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


def _name(kind: str) -> str:
    """The name in the legend; empty for what is not drawn."""
    return "" if kind == "send" else "communication" if kind in COMMUNICATION else kind


def _draw_rank(
    axis: Any, rank: RankReplay, bottom: int, shown: tuple[float, float], divisor: float
) -> set[str]:
    """Every action as a bar."""
    finest = (shown[1] - shown[0]) / FINEST
    bars: dict[str, list[list[float]]] = {}
    for span in rank.spans:
        name = _name(span.kind)
        if not name or span.end <= max(span.start, shown[0]) or span.start >= shown[1]:
            continue
        own = bars.setdefault(name, [])
        same = own and own[-1][2:] == [span.stage, span.microbatch]
        if same and span.start - own[-1][1] <= finest:
            own[-1][1] = max(own[-1][1], span.end)
        else:
            own.append([span.start, span.end, span.stage, span.microbatch])
    for name, spans in bars.items():
        low, height = LANES.get(name, COMPUTE)
        places = [(divisor * start, divisor * end) for start, end, *_ in spans]
        axis.add_patch(_bars(places, bottom + low, height, COLOURS[name], name not in LANES))
    return set(bars)


def _draw_shares(
    axis: Any, rank: RankReplay, bottom: int, shown: tuple[float, float], divisor: float
) -> set[str]:
    """What part of each interval a kind takes: stacked for compute, and as a shade where a lane has one kind."""
    width = (shown[1] - shown[0]) / BINS
    shares: dict[str, list[float]] = {}
    for span in rank.spans:
        if name := _name(span.kind):
            own = shares.setdefault(name, [0.0] * BINS)
            for at in range(int(span.start / width), min(BINS, int(span.end / width) + 1)):
                own[at] += max(0.0, min(span.end, (at + 1) * width) - max(span.start, at * width)) / width
    edges = [divisor * width * at for at in range(BINS + 1)]
    below = [bottom + COMPUTE[0]] * BINS
    for name in (name for name in COLOURS if name in shares):
        if name in LANES:
            _draw_shades(axis, shares[name], edges, bottom + LANES[name][0], LANES[name][1], COLOURS[name])
            continue
        top = [start + COMPUTE[1] * min(1.0, share) for start, share in zip(below, shares[name])]
        axis.stairs(top, edges, baseline=below, fill=True, color=COLOURS[name], linewidth=0)
        below = top
    return set(shares)


def _draw_shades(
    axis: Any, shares: Sequence[float], edges: Sequence[float], low: float, height: float, colour: str
) -> None:
    """A strip that is darker where a kind takes more of an interval; a lane is too thin for heights."""
    shades = [min(SHADES, ceil(SHADES * share)) for share in shares]
    for shade in sorted(set(shades) - {0}):
        places = [(edges[at], edges[at + 1]) for at, own in enumerate(shades) if own == shade]
        strip = _bars(places, low, height, colour, edges=False)
        strip.set_alpha(shade / SHADES)
        axis.add_patch(strip)


def _bars(places: Sequence[tuple[float, float]], low: float, height: float, colour: str, edges: bool) -> Any:
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


def _draw_numbers(axis: Any, step: Replay, shown: tuple[float, float], divisor: float) -> None:
    """Write the microbatch into each action that is wide enough."""
    width = shown[1] - shown[0]
    for number, rank in enumerate(step.ranks):
        for first, last in _actions(rank.spans):
            middle = (first.start + last.end) / 2
            if last.end - first.start > width / 110 and shown[0] < middle < shown[1]:
                axis.text(
                    divisor * middle,
                    len(step.ranks) - 1 - number + COMPUTE[0] + COMPUTE[1] / 2,
                    str(first.microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=6.5,
                    color=INK,
                )


def _actions(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """The first and the last piece of each action."""
    found: dict[tuple[int, int, str], list[Span]] = {}
    for span in spans:
        if span.kind in ("forward", "backward", "weight"):
            found.setdefault((span.stage, span.microbatch, span.kind), []).append(span)
    return [(own[0], own[-1]) for own in found.values()]


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
    if capacity_bytes and capacity_bytes < 2 * most:
        axis.axhline(
            capacity_bytes / size,
            color=COLOURS["wait"],
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            label=f"device memory {format_bytes(capacity_bytes)}",
        )
    axis.set_ylim(0, 1.1 * max(most, capacity_bytes if capacity_bytes < 2 * most else 0) / size)
    axis.set_ylabel(f"allocated, {unit}", color=INK)
    tidy(axis)


def _legend(figure: Any, drawn: set[str], memory: Any) -> None:
    """Below the picture, where it hides nothing."""
    from matplotlib.patches import Patch

    kinds = [kind for kind in COLOURS if kind in drawn]
    handles: list[Any] = [Patch(facecolor=COLOURS[kind]) for kind in kinds]
    labels = [LABELS.get(kind, kind) for kind in kinds]
    lines, names = memory.get_legend_handles_labels()
    figure.legend(
        [*handles, *lines],
        [*labels, *names],
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=FAINT,
    )
