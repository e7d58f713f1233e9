"""Layouts to plan for: by divisibility, each with a bound of its time.

None of it depends on the memory of a device: a search with more memory looks at the same layouts. The bound holds
for every policy of a layout, because a policy only adds work:

    step >= microbatches · work of a rank  +  forward and backward of the stages before its first,   for every rank
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from pagestash.simulation.cluster.layout import Layout, place_as_torchtitan
from pagestash.simulation.costs.build import split_stages, step_costs
from pagestash.simulation.costs.costs import LayerCosts
from pagestash.simulation.costs.memory import static_bytes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.parts import Layer
from pagestash.simulation.model.run import Run

VPP = (1, 2, 4, 8)
MOST_TP, MOST_CP, MOST_PP = 8, 8, 16
LONG = 16_384
"""Tokens of a sequence from which on context parallelism is considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to search for."""

    base: Run
    """A run whose model, cluster, precision, framework and other settings all layouts have."""
    microbatches: Sequence[int] = (1, 2)
    """Sequences of a microbatch to try."""
    fixed: dict[str, int] = field(default_factory=dict)
    """Degrees that are given: {"pp": 8}."""
    runners_up: int = 5
    """Layouts to find beside the best."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout, and what is known of it before it is planned."""

    run: Run
    seconds: float
    """The least that its step takes, under any policy."""
    static: int
    """Bytes of weights, gradients and optimizer state, of a mean rank."""


def bounded(wanted: Wanted) -> list[Bounded]:
    """All layouts, those with the lowest bounds first."""
    known: dict[tuple[int, ...], tuple[Sequence[Layer], Sequence[LayerCosts]]] = {}
    found = []
    for run in runs(wanted):
        layout = run.layout
        key = layout.tp, layout.cp, layout.ep, run.microbatch  # layers take the same however they are piped
        if key not in known:
            alone = replace(layout, pp=1, vpp=1, schedule="1F1B")
            one = replace(run, layout=alone, global_batch=alone.dp * run.microbatch, placement=None)
            known[key] = layers_of(run), step_costs(one).stages[0].layers
        layers, costs = known[key]
        stages = split_stages(costs, run.placed)
        seconds = least_seconds(stages, layout.pp, run.microbatches, run.overlaps_dispatch)
        static = sum(static_bytes(layers, layout, run.parameters).values()) // layout.pp
        found.append(Bounded(run, seconds, static))
    return sorted(found, key=lambda item: item.seconds)


def least_seconds(
    stages: Sequence[Sequence[LayerCosts]], ranks: int, microbatches: int, overlaps: bool
) -> float:
    """The bound of a step whose last action of a rank is a whole backward of its first stage."""
    works = [sum(_work(layer, overlaps) for layer in own) for own in stages]
    before = list(accumulate(works, initial=0.0))
    return max(microbatches * sum(works[rank::ranks]) + before[rank] for rank in range(ranks))


def _work(layer: LayerCosts, overlaps: bool) -> float:
    """Seconds that a layer takes of its rank for one microbatch, forward and backward."""
    own = layer.forward + layer.backward_input + layer.backward_weight
    sent = 0.0 if overlaps else (4 + 2 * layer.dispatches_again) * layer.dispatch_seconds
    return own.total + layer.recompute + 2 * (layer.stash_seconds + layer.offload_seconds.total) + sent


def runs(wanted: Wanted) -> Iterator[Run]:
    """All layouts by divisibility, with every microbatch size."""
    base = wanted.base
    config, devices = base.config, base.cluster.devices
    degrees: dict[str, Sequence[int]] = {
        "tp": _powers(min(MOST_TP, base.cluster.node.devices)),
        "cp": _powers(MOST_CP) if base.sequence >= LONG else (1,),
        "pp": range(1, min(MOST_PP, config.layers) + 1),
        "vpp": VPP,
        "ep": _powers(config.experts),
    }
    degrees |= {name: (value,) for name, value in wanted.fixed.items()}
    for values in product(*degrees.values()):
        ways = dict(zip(degrees, values))
        schedule = "1F1B" if ways["vpp"] == 1 else "Interleaved1F1B"
        try:
            layout = Layout(devices=devices, zero=base.layout.zero, schedule=schedule, **ways)
            layout.check_model(config, base.sequence)
        except ValueError:
            continue
        placed = None
        if base.framework.name == "torchtitan" and layout.pp > 1:
            placed = place_as_torchtitan(config.layers, layout.stages)
            if placed is None:
                continue
        if layout.stages > config.layers or (layout.pp == 1 and layout.vpp > 1):
            continue
        for microbatch in wanted.microbatches:
            run = replace(base, layout=layout, microbatch=microbatch, placement=placed)
            if base.global_batch % (microbatch * layout.dp):
                continue
            # A schedule does not allow fewer microbatches.
            if run.microbatches >= layout.pp and not (layout.vpp > 1 and run.microbatches % layout.pp):
                yield run


def _powers(most: int) -> list[int]:
    return [1 << at for at in range(most.bit_length()) if 1 << at <= most]
