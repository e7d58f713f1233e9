"""`search`: the fastest layout and homes for a model on a cluster.

Layouts (`layouts.py`) are looked at in the order of their bounds, until no bound is below the best step. Each gets
homes (`homes.py`) for the memory that the reserve leaves, and is replayed. What is left out could not have been
faster, as far as the bounds hold. Planning and replay see a step whose steady state is short (`lengthened.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pagestash.simulation.costs.costs import StepCosts
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.lengthened import shortened, step_seconds
from pagestash.simulation.search.homes import Planned, plan_homes
from pagestash.simulation.search.layouts import Bounded, Wanted, bounded, least_seconds
from pagestash.sizes import format_bytes

NAMES = dict.fromkeys(("forward", "backward", "weight"), "compute") | {
    "dispatch": "experts' rows",
    "combine": "experts' rows",
    "gather": "gathers",
    "wait": "waits",
    "stash": "stash copies",
}
"""What a step's seconds are for, by kind of span."""


def shares(found: Planned) -> dict[str, float]:
    """Seconds of a mean rank by what they are for."""
    if found.played is None:
        return {}
    total: dict[str, float] = {}
    for rank in found.played.ranks:
        for kind, seconds in rank.seconds().items():
            if kind not in ("send", "out", "back"):
                name = NAMES.get(kind, kind)
                total[name] = total.get(name, 0.0) + seconds / len(found.played.ranks)
    total["bubble"] = found.played.bubble() * found.played.seconds
    once = total.pop("optimizer", 0.0)
    scale = (found.seconds - once) / (found.played.seconds - once)  # the replay may have fewer microbatches
    return {name: scale * own for name, own in total.items()} | {"optimizer": once}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The fastest that fits, and what else was looked at."""

    best: Planned
    others: tuple[Planned, ...]
    looked_at: int
    """Layouts that divide, and whose weights fit."""

    def lacks(self, other: Planned) -> str:
        """Why it is not the best."""
        if other.played is None:
            return _lack(other)
        own, best = shares(other), shares(self.best)
        more = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {*own, *best}}
        what = max(sorted(more), key=more.__getitem__)
        return f"{1e3 * more[what]:,.0f} ms more {what}" if more[what] > 0 else "nothing but time"


def search(wanted: Wanted, progress: Callable[[str], None] = lambda line: None) -> ClusterPlan:
    """Raises a `ValueError` if nothing fits, with the nearest layout. `progress` gets a line for each."""
    cluster = wanted.base.cluster
    room = wanted.base.room - cluster.device.outside
    holding = [item for item in bounded(wanted) if item.static <= room]
    if not holding:
        raise ValueError(
            f"no layout of {cluster.devices} devices divides this model and has room for its weights: "
            "try more devices, ZeRO 3, or another global batch"
        )
    fitting: list[Planned] = []
    lacking: list[Planned] = []
    for number, item in enumerate(holding, start=1):
        below = min(own.seconds for own in fitting) if len(fitting) > wanted.runners_up else float("inf")
        if item.seconds >= below:
            break
        found = try_layout(item, below)
        progress(f"layout {number} of at most {len(holding)}: {describe(item.run)}, {_outcome(found)}")
        if found is not None:
            (lacking if found.played is None else fitting).append(found)
    fitting.sort(key=lambda own: own.seconds)
    if not fitting:
        nearest = min(lacking, key=lambda own: own.lacks)
        raise ValueError(
            f"nothing fits: the nearest of {len(lacking)} layouts, {describe(nearest.run)}, lacks "
            f"{_lack(nearest)}"
        )
    # Those that would be faster if they fitted say what memory is worth.
    tempting = [own for own in lacking if own.bound < fitting[0].seconds][: min(2, wanted.runners_up)]
    slower = fitting[1 : 1 + wanted.runners_up - len(tempting)]
    return ClusterPlan(best=fitting[0], others=(*slower, *tempting), looked_at=len(holding))


def _lack(planned: Planned) -> str:
    size, where = planned.lacks_bytes, "device"
    if not size:
        size, where = planned.host_lacks_bytes, "host"
    return f"{format_bytes(size)} of {where} memory"


def _outcome(found: Planned | None) -> str:
    if found is None:
        return "slower than the best"
    return "does not fit" if found.played is None else f"{found.seconds:.2f} s"


def describe(run: Run) -> str:
    """The layout in one line."""
    ways = {name: getattr(run.layout, name) for name in ("tp", "cp", "ep", "pp", "vpp")}
    shown = [f"{name.upper()}{n}" for name, n in ways.items() if n > 1 or name in ("tp", "ep", "pp")]
    return f"{' '.join(shown)} MBS{run.microbatch} {run.layout.schedule}"


def try_layout(item: Bounded, below: float = float("inf")) -> Planned | None:
    """A layout with the fastest homes that fit; without a replay if none does.

    None if a bound shows that they take `below` seconds or more.
    """
    planned = [replace(own, bound=item.seconds) for own in plan_homes(shortened(item.run))]
    fitting = [own for own in planned if not own.lacks]
    if not fitting:
        return _whole(min(planned, key=lambda own: own.lacks), item.run)
    found = [_replayed(item, own) for own in fitting if _bound(item.run, own.costs) < below]
    return min(found, key=lambda own: own.seconds, default=None)


def _bound(run: Run, costs: StepCosts) -> float:
    stages = [stage.layers for stage in costs.stages]
    return least_seconds(stages, run.layout.pp, run.microbatches, run.overlaps_dispatch)


def _replayed(item: Bounded, planned: Planned) -> Planned:
    whole = _whole(planned, item.run)
    played, seconds = step_seconds(whole.run, whole.costs)
    return replace(whole, played=played, seconds=max(seconds, item.seconds))


def _whole(planned: Planned, run: Run) -> Planned:
    """With all microbatches again."""
    return replace(planned, run=replace(planned.run, global_batch=run.global_batch))
