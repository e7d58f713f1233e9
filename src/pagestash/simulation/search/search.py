"""`search`: the fastest layout and homes for a model on a cluster.

Layouts (`layouts.py`) are looked at in the order of their bounds, until no bound is below the best step. Each gets
homes (`homes.py`) for the memory that the reserve leaves, and is replayed. What is left out could not have been
faster, as far as the bounds hold. Planning and replay see a step whose steady state is short (`lengthened.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pagestash.simulation.costs.run import Run
from pagestash.simulation.replay.lengthened import shortened, step_seconds
from pagestash.simulation.replay.played import Replay
from pagestash.simulation.search.homes import BOTH, Allowed, HomePlanner, Planned
from pagestash.simulation.search.layouts import Bounded, Wanted, least_seconds, worth_planning
from pagestash.sizes import format_bytes


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
        names = {"dispatch": "experts' rows", "combine": "experts' rows", "gather": "gathers"}
        names |= dict.fromkeys(("forward", "backward", "weight"), "compute")
        names |= {"wait": "waits", "stash": "stash copies"}
        for rank in ranks:
            for kind, seconds in rank.seconds().items():
                if kind not in ("send", "out", "back"):
                    name = names.get(kind, kind)
                    total[name] = total.get(name, 0.0) + seconds / len(ranks)
        total["bubble"] = self.played.bubble() * self.played.seconds
        once = total.get("optimizer", 0.0)
        scale = (self.seconds - once) / (
            self.played.seconds - once
        )  # the replay may be of fewer microbatches
        return {name: own if own == once else scale * own for name, own in total.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The fastest that fits, and what else was looked at."""

    best: Found
    others: tuple[Found, ...]
    looked_at: int
    """Layouts that divide, and whose weights fit."""

    def lacks(self, other: Found) -> str:
        """Why it is not the best."""
        if other.played is None:
            if other.planned.lacks_bytes:
                return f"{format_bytes(other.planned.lacks_bytes)} of device memory"
            return f"{format_bytes(other.planned.host_lacks_bytes)} of host memory"
        own, best = other.shares(), self.best.shares()
        more = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {*own, *best}}
        what = max(sorted(more), key=more.__getitem__)
        return f"{1e3 * more[what]:,.0f} ms more {what}" if more[what] > 0 else "nothing but time"


def search(wanted: Wanted, progress: Callable[[str], None] = lambda line: None) -> ClusterPlan:
    """Raises a `ValueError` if nothing fits, with the nearest layout. `progress` gets a line for each."""
    bounds = worth_planning(wanted)
    room = wanted.base.room - wanted.cluster.device.outside
    holding = [item for item in bounds if item.static <= room]
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
    return ClusterPlan(best=fitting[0], others=(*slower, *tempting), looked_at=len(holding))


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
    item: Bounded, allowed: Sequence[Allowed] = BOTH, room: int | None = None, below: float = float("inf")
) -> Found | None:
    """A layout with the fastest homes that fit; without a replay if none does.

    None if a bound shows that they take `below` seconds or more.
    """
    run = item.run
    room = run.room if room is None else room
    planner = HomePlanner(shortened(run), allowed)
    # What may be offloaded is not always better offloaded: the estimate of waits is rough.
    planners = [planner, planner.limit(("recompute",))] if planner.mixes else [planner]
    planned = [own.plan(room) for own in planners]
    fitting = [own for own in planned if not (own.lacks_bytes or own.host_lacks_bytes)]
    if not fitting:
        nearest = min(planned, key=lambda own: own.lacks_bytes + own.host_lacks_bytes)
        return Found(planned=_whole(nearest, run), bound=item.seconds) if below == float("inf") else None
    if len({own.policies for own in fitting}) == 1:
        fitting = fitting[:1]
    bounds = [(least_seconds(own.costs, run.microbatches), own) for own in fitting]
    found = [_replayed(item, own) for bound, own in bounds if bound < below]
    return min(found, key=lambda own: own.seconds, default=None)


def _replayed(item: Bounded, planned: Planned) -> Found:
    planned = _whole(planned, item.run)
    played, seconds = step_seconds(planned.run, planned.costs)
    return Found(planned=planned, bound=item.seconds, played=played, seconds=max(seconds, item.seconds))


def _whole(planned: Planned, run: Run) -> Planned:
    """With all microbatches again."""
    return replace(planned, run=replace(planned.run, global_batch=run.global_batch))
