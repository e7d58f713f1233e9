"""Layouts to plan for: by divisibility, each with a bound of its time and estimates of its memory.

None of it depends on the memory of a device: a search with more memory looks at the same layouts. The bound holds
for every policy of a layout, because a policy only adds work:

    step >= microbatches · work of a rank  +  forward and backward of the stages before its first,   for every rank
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from pagestash.models.config import DecoderConfig
from pagestash.simulation.cluster.cluster import Cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.costs import LayerCosts, StepCosts
from pagestash.simulation.costs.memory import static_bytes
from pagestash.simulation.costs.run import Run
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.parts import Layer
from pagestash.simulation.search.homes import BOTH, Allowed, choices_of, kind_of, layer_costs, layer_kinds

VPP = (1, 2, 4, 8)
MOST_TP, MOST_PP = 8, 16
LONG = 16_384
"""Tokens of a sequence from which on context parallelism is considered."""
FRONTS = 2
"""A layout is planned for if fewer than so many others are better in all: bound, and both estimates of memory."""
RUNNERS_UP = 5
WHOLE = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B")
"""Schedules whose last action of a rank is a whole backward of its first stage."""


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
    runners_up: int = RUNNERS_UP
    """Layouts to find beside the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A layout, and what is known of it before it is planned."""

    run: Run
    seconds: float
    """The least that its step takes, under any policy."""
    static: int
    """Bytes of weights, gradients and optimizer state, of a mean rank."""
    most: float
    """Bytes of its fullest rank without a policy, as estimated."""
    least: float
    """And with the policy that keeps least."""


def worth_planning(wanted: Wanted) -> list[Bounded]:
    """Layouts that few others beat, those with the lowest bounds first."""
    found = sorted(_Bounds(wanted).all(), key=lambda item: item.seconds)
    kept: list[Bounded] = []
    for at, item in enumerate(found):
        better = sum(own.most <= item.most and own.least <= item.least for own in found[:at])
        if better < FRONTS:
            kept.append(item)
    return kept


def least_seconds(costs: StepCosts, microbatches: int) -> float:
    """The bound of a planned step."""
    works = {stage.stage: [_work(layer, costs) for layer in stage.layers] for stage in costs.stages}
    placed = [works[stage.stage] for stage in costs.stages]
    firsts = [rank.stages[0].stage for rank in costs.ranks]
    busy = [[work for stage in rank.stages for work in works[stage.stage]] for rank in costs.ranks]
    return _bound(placed, firsts, busy, microbatches, costs.schedule in WHOLE)


def _bound(
    stages: Sequence[Sequence["_Work"]],
    firsts: Sequence[int],
    ranks: Sequence[Sequence["_Work"]],
    microbatches: int,
    whole: bool,
) -> float:
    """`stages` have layers, `ranks` those of all their stages, `firsts` the first stage of each rank."""
    passed = (sum(work.forward + (work.backward if whole else 0.0) for work in own) for own in stages)
    before = list(accumulate(passed, initial=0.0))
    return max(
        microbatches * sum(work.forward + work.backward for work in own) + before[first]
        for own, first in zip(ranks, firsts)
    )


class _Work(NamedTuple):
    """Seconds that a layer takes of its rank for one microbatch."""

    forward: float
    backward: float


def _work(layer: LayerCosts, costs: StepCosts) -> _Work:
    both = layer.stash_seconds.at() + layer.moved_bytes.at() / costs.memory_rate
    sent = 0.0 if costs.overlaps_dispatch else layer.dispatch_seconds.at() + layer.combine_seconds.at()
    both += sent
    backward = layer.backward_input.at() + layer.backward_weight.at() + layer.recompute.at()
    return _Work(layer.forward.at() + both, backward + both + (sent if layer.dispatches_again else 0.0))


class _Bounds:
    """Bounds of every layout. Layers take the same time however they are piped: those are found once."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._known: dict[tuple[int, ...], _Kinds] = {}

    def all(self) -> Iterator[Bounded]:
        for layout, microbatch in layouts(self._wanted):
            run = self._run(layout, microbatch)
            # A schedule does not allow fewer microbatches.
            if run.microbatches >= layout.pp and not (layout.vpp > 1 and run.microbatches % layout.pp):
                yield self._bounded(run)

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

    def _bounded(self, run: Run) -> Bounded:
        layout, kinds = run.layout, self._kinds(run)
        ends = list(accumulate(run.placed, initial=1))
        stages = [kinds.works[first:last] for first, last in pairwise(ends)]
        stages[0] = [kinds.works[0], *stages[0]]
        stages[-1] = [*stages[-1], kinds.works[-1]]
        ranks = [[work for stage in stages[rank :: layout.pp] for work in stage] for rank in range(layout.pp)]
        static = int(sum(static_bytes(kinds.layers, layout, run.parameters)) / layout.pp)
        held = _held_layers(run)
        return Bounded(
            run=run,
            seconds=_bound(stages, range(layout.pp), ranks, run.microbatches, layout.schedule in WHOLE),
            static=static,
            most=static + held * kinds.most,
            least=static + held * kinds.least,
        )

    def _kinds(self, run: Run) -> "_Kinds":
        layout = run.layout
        key = layout.tp, layout.cp, layout.ep, run.microbatch
        if key not in self._known:
            dense = run.config.dense_layers
            plain = layer_kinds(run)
            layers = layers_of(run.shape)
            costs = layer_costs(run)
            works = {name: _work(layer, costs) for name, layer in plain.items()}
            choices = choices_of(run, self._wanted.allowed)
            smallest = (*choices[:1], *choices[-2:])
            kept = [layer_kinds(run, choice)["moe"].kept_bytes.at() for choice in smallest]
            self._known[key] = _Kinds(
                layers, [works[kind_of(layer.name, dense)] for layer in layers], kept[0], min(kept)
            )
        return self._known[key]


class _Kinds(NamedTuple):
    """What is the same for all layouts with these tensor, context and expert parallel ranks."""

    layers: list[Layer]
    works: list[_Work]
    most: float
    """Bytes of a layer that are kept without a policy."""
    least: float


def _held_layers(run: Run) -> float:
    """Layers whose activations the first rank holds at the most, each for one microbatch."""
    layout, count = run.layout, run.microbatches
    if layout.vpp == 1:
        return min(count, layout.pp) * max(run.placed)
    chunks = min(count * layout.vpp, (layout.vpp - 1) * layout.pp + 2 * layout.pp - 1)
    return chunks * max(run.placed)


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
