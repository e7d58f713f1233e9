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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from pagestash.policy import Policy
from pagestash.simulation.build import Run
from pagestash.simulation.choices import BOTH, Allowed, HomePlanner, Planned
from pagestash.simulation.cluster import SHIPPED, load_cluster
from pagestash.simulation.layouts import Bounded, Wanted, least_seconds, worth_planning
from pagestash.simulation.played import Replay
from pagestash.simulation.steady import shortened, step_seconds
from pagestash.sizes import format_bytes

RUNNERS_UP = 5
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


def search(wanted: Wanted) -> Search:
    """Raises a `ValueError` if nothing fits, with the layout that comes nearest."""
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
    for item in holding:
        below = min(own.seconds for own in fitting) if len(fitting) > RUNNERS_UP else float("inf")
        if item.seconds >= below:
            break
        found = try_layout(item, wanted.allowed, below=below)
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
    tempting = [own for own in lacking if own.bound < fitting[0].seconds][:2]
    slower = fitting[1 : 1 + RUNNERS_UP - len(tempting)]
    return Search(best=fitting[0], others=(*slower, *tempting), looked_at=len(holding))


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
    planners = [HomePlanner(shortened(run), own) for own in _mixes(allowed)]
    first = planners[0]
    if first.most_bytes <= room:
        return _replayed(item, first.plan(room))
    sizes = [
        (least_seconds(planner.plain, run.microbatches, planner.least_work(size)), -size, planner)
        for planner in planners
        for size in _rungs(planner, room)
    ]
    best: Found | None = None
    nearest: Planned | None = None
    seen: set[tuple[Policy, ...]] = set()
    for bound, size, planner in sorted(sizes, key=lambda own: own[:2]):
        if bound >= (below if best is None else min(below, best.seconds)):
            break
        planned = planner.plan(-size)
        if planned.lacks_bytes or planned.host_lacks_bytes:
            nearest = planned
        elif planned.policies not in seen:
            seen.add(planned.policies)
            if least_seconds(planned.costs, run.microbatches) < (below if best is None else best.seconds):
                found = _replayed(item, planned)
                best = found if best is None or found.seconds < best.seconds else best
    if best is None and below == float("inf"):
        return Found(planned=_whole(nearest or first.plan(room), run), bound=item.seconds)
    return best


def _mixes(allowed: Sequence[Allowed]) -> list[Sequence[Allowed]]:
    """What may be offloaded is not always better offloaded: the estimate of waits is rough."""
    return [allowed, ("recompute",)] if len(allowed) > 1 else [allowed]


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


def _replayed(item: Bounded, planned: Planned) -> Found:
    planned = _whole(planned, item.run)
    played, seconds = step_seconds(planned.run)
    return Found(planned=planned, bound=item.seconds, played=played, seconds=max(seconds, item.seconds))


def _whole(planned: Planned, run: Run) -> Planned:
    """With all microbatches again."""
    return replace(planned, run=replace(planned.run, global_batch=run.global_batch))
