"""`search`: the fastest layout and policies for a model on a cluster.

A candidate is a layout with homes that were planned for one of a fixed ladder of memory sizes. Neither depends on
the memory of the device, which only says what fits:

    step(memory) = least time of a candidate that takes at most `memory`

so more memory is never slower. Layouts (`layouts.py`) are looked at in the order of their bounds, until no bound is
below the best step, and so are the sizes that homes of a layout are planned for. What is left out could not have
been faster, as far as the bounds hold.

Planning and replay see a step whose steady state is short (`steady.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import count

from pagestash.policy import Policy
from pagestash.simulation.cluster.cluster import SHIPPED, load_cluster
from pagestash.simulation.costs.costs import StepCosts
from pagestash.simulation.costs.run import Run
from pagestash.simulation.replay.lengthened import alone_seconds, shortened, step_seconds
from pagestash.simulation.replay.played import Replay
from pagestash.simulation.search.homes import BOTH, Allowed, HomePlanner, Planned
from pagestash.simulation.search.layouts import Bounded, Wanted, least_seconds, seconds_around, worth_planning
from pagestash.sizes import format_bytes

RUNG = 1.04
"""Homes are planned for sizes of memory that are its powers, in bytes, and for those of shipped devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout with its policies, replayed; or one that does not fit."""

    planned: Planned
    bound: float
    """Seconds, if memory were no matter."""
    played: Replay | None = None
    seconds: float = float("inf")

    @property
    def run(self) -> Run:
        return self.planned.run

    def shares(self) -> dict[str, float]:
        """Seconds of a mean rank by what they are for."""
        if self.played is None:
            return {}
        ranks = self.played.ranks
        total: dict[str, float] = {}
        names = {"dispatch": "experts' rows", "combine": "experts' rows", "gather": "gathering weights"}
        names |= dict.fromkeys(("forward", "backward", "weight"), "compute")
        names |= {"wait": "waits for copies", "optimizer": "gradients and optimizer", "stash": "stash copies"}
        for rank in ranks:
            for kind, seconds in rank.seconds().items():
                if kind not in ("send", "out", "back"):
                    name = names.get(kind, kind)
                    total[name] = total.get(name, 0.0) + seconds / len(ranks)
        total["bubble"] = self.played.bubble() * self.played.seconds
        once = total.get("gradients and optimizer", 0.0)
        scale = (self.seconds - once) / (
            self.played.seconds - once
        )  # the replay may be of fewer microbatches
        return {name: own if own == once else scale * own for name, own in total.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The fastest that fits, and what else was looked at."""

    best: Found
    others: tuple[Found, ...]
    looked_at: int
    """Layouts that divide, and whose weights fit."""

    def lacks(self, other: Found) -> str:
        """Why it is not the best."""
        if other.played is None:
            if other.planned.lacks_bytes:
                return f"{format_bytes(other.planned.lacks_bytes)} of device memory, with any policy"
            return f"{format_bytes(other.planned.host_lacks_bytes)} of host memory"
        own, best = other.shares(), self.best.shares()
        more = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {*own, *best}}
        what = max(sorted(more), key=more.__getitem__)
        return f"{1e3 * more[what]:,.0f} ms more {what}" if more[what] > 0 else "nothing but time"


def search(wanted: Wanted, progress: Callable[[str], None] = lambda line: None) -> Search:
    """Raises a `ValueError` if nothing fits, with the nearest layout. `progress` gets a line for each."""
    bounds = worth_planning(wanted)
    device = wanted.cluster.device
    holding = [item for item in bounds if item.static <= device.memory - device.outside]
    if not holding:
        raise ValueError(
            f"no layout of {wanted.cluster.devices} devices divides this model and has room for its weights: "
            "try more devices, ZeRO 3, or another global batch"
        )
    fitting: list[Found] = []
    lacking: list[Found] = []
    for number, item in enumerate(holding, start=1):
        below = min(own.seconds for own in fitting) if len(fitting) > wanted.runners_up else float("inf")
        if item.seconds >= below:
            break
        found = try_layout(item, wanted.allowed, below=below)
        progress(f"layout {number} of at most {len(holding)}: {describe(item.run)}, {_outcome(found)}")
        if found is not None:
            (lacking if found.played is None else fitting).append(found)
    fitting.sort(key=lambda own: own.seconds)
    if not fitting:
        nearest = min(lacking, key=lambda own: own.planned.lacks_bytes + own.planned.host_lacks_bytes)
        raise ValueError(
            f"nothing fits: the nearest of {len(lacking)} layouts, {describe(nearest.run)}, lacks "
            f"{format_bytes(nearest.planned.lacks_bytes or nearest.planned.host_lacks_bytes)}"
        )
    # Those that would be faster if they fitted say what memory is worth.
    tempting = [own for own in lacking if own.bound < fitting[0].seconds][: min(2, wanted.runners_up)]
    slower = fitting[1 : 1 + wanted.runners_up - len(tempting)]
    return Search(best=fitting[0], others=(*slower, *tempting), looked_at=len(holding))


def _outcome(found: Found | None) -> str:
    if found is None:
        return "slower than the best"
    return "does not fit" if found.played is None else f"{found.seconds:.2f} s"


def describe(run: Run) -> str:
    """The layout in one line."""
    layout = run.layout
    degrees = [
        ("TP", layout.tp),
        ("CP", layout.cp),
        ("EP", layout.ep),
        ("PP", layout.pp),
        ("VPP", layout.vpp),
    ]
    shown = " ".join(f"{name}{value}" for name, value in degrees if value > 1 or name in ("TP", "EP", "PP"))
    return f"{shown} MBS{run.microbatch} {layout.schedule}"


def try_layout(
    item: Bounded, allowed: Sequence[Allowed] = BOTH, budget: int | None = None, below: float = float("inf")
) -> Found | None:
    """The fastest homes of a layout that fit, by replay; without a replay if none fits.

    None if a bound shows that they take `below` seconds or more.
    """
    run, room = item.run, item.run.cluster.device.memory if budget is None else budget
    first = HomePlanner(shortened(run), allowed)
    if first.most_bytes <= room:
        return _replayed(item, first.plan(room))
    best: Found | None = None
    nearest: Planned | None = None
    for bound, planned in _by_bound(first, run, room):
        if bound >= (below if best is None else min(below, best.seconds)):
            break
        if planned.lacks_bytes or planned.host_lacks_bytes:
            nearest = planned
            continue
        found = _replayed(item, planned, bound)
        best = found if best is None or found.seconds < best.seconds else best
    if best is None and below == float("inf"):
        return Found(planned=_whole(nearest or first.plan(room), run), bound=item.seconds)
    return best


def _by_bound(first: HomePlanner, run: Run, room: int) -> Iterator[tuple[float, Planned]]:
    """Homes for every size of the ladder up to `room`, each with a bound of its step, the lowest bound first.

    A size has a bound before it is planned for, and homes have a higher one when they are planned, and again when
    one rank was replayed alone: each time they wait for their turn again.
    """
    # What may be offloaded is not always better offloaded: the estimate of waits is rough.
    planners = [first, first.limit(("recompute",))] if len(first.allowed) > 1 else [first]
    number = count()
    queue: list[tuple[float, int, int, HomePlanner | Planned]] = []
    for planner in planners:
        for size in _rungs(planner, room):
            bound = least_seconds(planner.plain, run.microbatches, planner.least_work(size))
            heappush(queue, (bound, -size, next(number), planner))
    seen: set[tuple[Policy, ...]] = set()
    alone: set[int] = set()
    while queue:
        bound, size, at, what = heappop(queue)
        if at in alone:
            assert isinstance(what, Planned)
            yield bound, what
            continue
        if isinstance(what, HomePlanner):
            what = what.plan(-size)
            if what.policies in seen:
                continue
            seen.add(what.policies)
            higher = least_seconds(what.costs, run.microbatches)
            at = next(number)
        else:
            alone.add(at)
            higher = _least_alone(run, what.costs)
        heappush(queue, (max(bound, higher), size, at, what))


def _least_alone(run: Run, costs: StepCosts) -> float:
    """A bound that knows of waits for copies: the rank that moves most, alone, and the stages before it."""
    rank = max(costs.ranks, key=lambda own: own.leaving_bytes).rank
    return alone_seconds(run, costs, rank) + seconds_around(costs, rank)


def _rungs(planner: HomePlanner, room: int) -> list[int]:
    """The sizes of the ladder that are at most `room`, and at least about what the layout takes at least."""
    least = min(planner.least_bytes, room)
    found = [size for size in _shipped() if least <= size <= room]
    at = math.ceil(math.log(least, RUNG))
    while (size := int(RUNG**at)) <= room:
        found.append(size)
        at += 1
    return found


@cache
def _shipped() -> list[int]:
    """The memory of shipped devices, which are sizes of the ladder, too: nothing of it is left unused."""
    return [load_cluster(name, 1).device.memory for name in SHIPPED]


def _replayed(item: Bounded, planned: Planned, bound: float = 0.0) -> Found:
    planned = _whole(planned, item.run)
    played, seconds = step_seconds(planned.run, planned.costs)
    return Found(
        planned=planned, bound=item.seconds, played=played, seconds=max(seconds, bound, item.seconds)
    )


def _whole(planned: Planned, run: Run) -> Planned:
    """With all microbatches again."""
    return replace(planned, run=replace(planned.run, global_batch=run.global_batch))
