"""`search`: the fastest layout and policies for a model on a cluster.

Layouts are enumerated by divisibility and pruned by weights and optimizer state alone. Each one that is left has a
bound: its step without a policy, as if it fitted, from the slowest rank's work and the least bubble. In the order
of that bound each is planned (`choices.py`), and those that fit are replayed, until no bound is below what was
found. A policy only adds time: nothing that is left out could be faster, as far as the bound holds for the replay.

Planning and replay see a step whose steady state is short; a microbatch more takes as long as the last ones took.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise

from pagestash.models.config import DecoderConfig
from pagestash.policy import format_bytes
from pagestash.simulation.build import Run, step_costs
from pagestash.simulation.choices import BOTH, Allowed, Planned, kind_of, layer_kinds, plan_homes
from pagestash.simulation.cluster import Cluster
from pagestash.simulation.layout import Layout
from pagestash.simulation.memory import static_bytes
from pagestash.simulation.parts import Layer, layers_of
from pagestash.simulation.replay import Replay, replay

RUNNERS_UP = 5
VPP = (1, 2, 4, 8)
MOST_TP, MOST_PP = 8, 16
LONG = 16_384
"""Tokens of a sequence from which on context parallelism is considered."""
PATIENCE = 6
"""So many layouts in a row that fit and are slower end the search."""
HOPELESS = 40
"""So many layouts that do not fit end it, too."""
LEVELS = 32
"""Budgets that homes are planned for, as parts of what a layout takes without a policy."""
STEADY = 2
"""Times the pipeline's ranks: microbatches from which on a schedule only repeats itself."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to search for."""

    config: DecoderConfig
    cluster: Cluster
    sequence: int
    global_batch: int
    base: Run
    """A run whose precision, framework and other settings all layouts have."""
    microbatches: Sequence[int] = (1, 2)
    """Sequences of a microbatch to try."""
    schedules: Sequence[str] = ("1F1B", "Interleaved1F1B")
    allowed: Sequence[Allowed] = BOTH
    fixed: dict[str, int] = field(default_factory=dict)
    """Degrees that are given: {"pp": 8}."""
    refines: bool = True
    """Whether the best layout's homes are looked for once more, among more candidates."""


def search(wanted: Wanted) -> Search:
    """Raises a `ValueError` if nothing fits, with the layout that comes nearest."""
    bounds = sorted(_Bounds(wanted).all(), key=lambda item: item[0])
    if not bounds:
        raise ValueError(
            f"no layout of {wanted.cluster.devices} devices divides this model and has room for its weights: "
            "try more devices, ZeRO 3, or another global batch"
        )
    found: list[Found] = []
    best, idle = float("inf"), 0
    for bound, run in bounds:
        fitting = [item for item in found if item.played is not None]
        if (bound >= best and len(fitting) > RUNNERS_UP) or (fitting and idle >= PATIENCE):
            break
        if len(found) - len(fitting) >= HOPELESS:
            break
        item = _try(run, bound, wanted.allowed)
        found.append(item)
        idle = 0 if item.seconds < best else idle + (item.played is not None)
        best = min(best, item.seconds)
    fitting = sorted((item for item in found if item.played is not None), key=lambda item: item.seconds)
    if not fitting:
        nearest = min(found, key=lambda item: item.planned.lacks_bytes + item.planned.host_lacks_bytes)
        told = describe(nearest.run)
        raise ValueError(
            f"nothing fits: the nearest of {len(found)} layouts, {told}, lacks "
            f"{format_bytes(nearest.planned.lacks_bytes or nearest.planned.host_lacks_bytes)}"
        )
    if wanted.refines:
        fitting[0] = _refined(fitting[0], wanted.allowed)
    # Those that would be faster if they fitted say what memory is worth.
    tempting = [item for item in found if item.played is None and item.bound < fitting[0].seconds][:2]
    slower = fitting[1 : 1 + RUNNERS_UP - len(tempting)]
    return Search(best=fitting[0], others=(*slower, *tempting), looked_at=len(bounds))


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


def shortened(run: Run, times: int = STEADY) -> Run:
    """The run with the fewest microbatches that have a steady state."""
    count = min(run.microbatches, times * run.layout.pp)
    return replace(run, global_batch=count * run.layout.dp * run.microbatch)


def step_seconds(run: Run) -> tuple[Replay, float]:
    """A replay, and the seconds of the whole step: what is left of a long one goes on as it went before."""
    short, longer = shortened(run, STEADY), shortened(run, 2 * STEADY)
    played = replay(step_costs(longer))
    more = run.microbatches - longer.microbatches
    if not more:
        return played, played.seconds
    before = replay(step_costs(short)).seconds
    each = (played.seconds - before) / (longer.microbatches - short.microbatches)
    return played, played.seconds + more * each


def best_homes(run: Run, allowed: Sequence[Allowed] = BOTH, budget: int | None = None) -> Planned:
    """The fastest homes of a layout for a budget, by replay.

    Candidates are planned for levels of memory that do not depend on the budget, so more memory is never slower.
    """
    room = run.cluster.device.memory if budget is None else budget
    short = shortened(run)
    plain = plan_homes(short, (), 1 << 62)
    most = max(rank.device_bytes for rank in plain.costs.ranks)
    if most <= room:
        return replace(plain, run=replace(plain.run, global_batch=run.global_batch))
    kinds = [allowed, *((home,) for home in allowed if len(allowed) > 1)]
    found = []
    for level in range(LEVELS - 1, 0, -1):
        size = most * level // LEVELS
        if size > room:
            continue
        tried = [plan_homes(short, own, size) for own in kinds]
        if all(item.lacks_bytes for item in tried):
            break
        found += [item for item in tried if not item.lacks_bytes and not item.host_lacks_bytes]
    if not found:
        planned = plan_homes(short, allowed, room)
    else:
        planned = min(found, key=lambda item: replay(item.costs).seconds)
    return replace(planned, run=replace(planned.run, global_batch=run.global_batch))


def _try(run: Run, bound: float, allowed: Sequence[Allowed]) -> Found:
    # What may be offloaded is not always better offloaded: the estimate of waits is rough.
    kinds: list[Sequence[Allowed]] = [allowed, ("recompute",)] if len(allowed) > 1 else [allowed]
    found = []
    for own in kinds:
        planned = plan_homes(shortened(run), own)
        planned = replace(planned, run=replace(planned.run, global_batch=run.global_batch))
        if planned.lacks_bytes or planned.host_lacks_bytes:
            found.append(Found(planned=planned, bound=bound))
        else:
            played, seconds = step_seconds(planned.run)
            found.append(Found(planned=planned, bound=bound, played=played, seconds=seconds))
    return min(found, key=lambda item: (item.seconds, item.planned.lacks_bytes))


def _refined(item: Found, allowed: Sequence[Allowed]) -> Found:
    """With the fastest homes that were found for its layout."""
    planned = best_homes(item.run, allowed)
    if planned.lacks_bytes or planned.host_lacks_bytes:
        return item
    played, seconds = step_seconds(planned.run)
    better = Found(planned=planned, bound=item.bound, played=played, seconds=seconds)
    return min(item, better, key=lambda own: own.seconds)


class _Bounds:
    """The least time of every layout. Layers take the same time however they are piped: those are found once."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._known: dict[tuple[int, ...], tuple[list[Layer], list[float]]] = {}

    def all(self) -> Iterator[tuple[float, Run]]:
        for layout, microbatch in layouts(self._wanted):
            run = self._run(layout, microbatch)
            bound = self._bound(run)
            if bound is not None:
                yield bound, run

    def _run(self, layout: Layout, microbatch: int) -> Run:
        wanted = self._wanted
        return replace(
            wanted.base,
            config=wanted.config,
            cluster=wanted.cluster,
            layout=layout,
            sequence=wanted.sequence,
            global_batch=wanted.global_batch,
            microbatch=microbatch,
        )

    def _bound(self, run: Run) -> float | None:
        """None if a schedule does not allow so few microbatches, or weights and optimizer state do not fit."""
        layout, count = run.layout, run.microbatches
        if count < layout.pp or (layout.vpp > 1 and count % layout.pp):
            return None
        layers, seconds = self._layers(run)
        static = sum(static_bytes(layers, layout, run.parameters)) / layout.pp
        if static > run.cluster.device.memory - run.cluster.device.outside:
            return None
        ends = list(accumulate(run.placed, initial=1))
        stages = [sum(seconds[first:last]) for first, last in pairwise(ends)]
        stages[-1] += seconds[-1]
        ranks = [sum(stages[rank :: layout.pp]) for rank in range(layout.pp)]
        return count * max(ranks) + sum(ranks) / layout.pp * (layout.pp - 1) / layout.vpp

    def _layers(self, run: Run) -> tuple[list[Layer], list[float]]:
        layout = run.layout
        key = layout.tp, layout.cp, layout.ep, run.microbatch
        if key not in self._known:
            kinds, dense = layer_kinds(run), run.config.dense_layers
            layers = layers_of(run.shape)
            by_kind = {
                name: sum(getattr(layer, kind).at() for kind in _KINDS)
                + (0 if run.overlaps_dispatch else 2 * sum(getattr(layer, kind).at() for kind in _SENT))
                for name, layer in kinds.items()
            }
            seconds = [by_kind[kind_of(layer.name, dense)] for layer in layers]
            self._known[key] = layers, seconds
        return self._known[key]


_KINDS = ("forward", "backward_input", "backward_weight")
_SENT = ("dispatch_seconds", "combine_seconds")


def layouts(wanted: Wanted) -> Iterator[tuple[Layout, int]]:
    """All layouts by divisibility, with every microbatch size."""
    devices, config = wanted.cluster.devices, wanted.config
    within = partial(_degrees, wanted.fixed)
    for tp in within(
        "tp", [n for n in _powers(min(MOST_TP, wanted.cluster.node.devices)) if config.heads % n == 0]
    ):
        for cp in within("cp", _powers(8) if wanted.sequence >= LONG else [1]):
            for pp in within(
                "pp", [n for n in range(1, min(MOST_PP, config.layers) + 1) if devices % n == 0]
            ):
                for vpp in within("vpp", [n for n in VPP if pp > 1 or n == 1]):
                    for ep in within("ep", [n for n in _powers(config.experts) if config.experts % n == 0]):
                        yield from _made(wanted, tp, cp, pp, vpp, ep)


def _made(wanted: Wanted, tp: int, cp: int, pp: int, vpp: int, ep: int) -> Iterator[tuple[Layout, int]]:
    for schedule in wanted.schedules:
        try:
            layout = Layout(
                devices=wanted.cluster.devices,
                tp=tp,
                cp=cp,
                ep=ep,
                pp=pp,
                vpp=vpp,
                zero=wanted.base.layout.zero,
                schedule=schedule,
            )
            layout.check_model(wanted.config, wanted.sequence)
        except ValueError:
            continue
        if layout.stages > wanted.config.layers:
            continue
        for microbatch in wanted.microbatches:
            if wanted.global_batch % (microbatch * layout.dp) == 0:
                yield layout, microbatch


def _degrees(fixed: dict[str, int], name: str, values: Sequence[int]) -> Sequence[int]:
    return [fixed[name]] if name in fixed else values


def _powers(most: int) -> list[int]:
    return [1 << at for at in range(most.bit_length()) if 1 << at <= most]
