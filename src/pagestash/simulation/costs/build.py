"""`step_costs`: a model on a layout of a cluster, as the values that the replay reads."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

from pagestash.policy import HOMES, HomeName
from pagestash.schedules.plan import Plan, plans
from pagestash.simulation.costs.costs import (
    Amount,
    LayerCosts,
    Machine,
    RankCosts,
    RankPeak,
    StageCosts,
    StepCosts,
)
from pagestash.simulation.costs.dispatch import dispatch_seconds
from pagestash.simulation.costs.launches import graphed_parts, launch_seconds, step_launches
from pagestash.simulation.costs.memory import (
    LayerMemory,
    parameters_of,
    rank_peak,
    static_bytes,
)
from pagestash.simulation.costs.seconds import Seconds, repeated
from pagestash.simulation.model.homes import Placed
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.parts import Layer, Part
from pagestash.simulation.model.run import Run

T = TypeVar("T")
MOST_ACTIONS = 2_000_000
"""Most microbatches × stages of a simulated step."""


class Known:
    """Layers whose costs were found before, for runs that differ in homes and microbatches alone.

    Layers with the same parts and the same homes are alike: they are costed once.
    """

    def __init__(self, run: Run) -> None:
        self.layers = layers_of(run)  # which keeps parts alive, so that they have their identity
        self._memory: dict[tuple[int, tuple[Placed, ...]], LayerMemory] = {}
        self._costs: dict[int, LayerCosts] = {}

    def stages(self, run: Run) -> list[list[tuple[Layer, LayerMemory]]]:
        """The layers of each stage, with their memory."""
        found = [(layer, self._of(run, layer)) for layer in self.layers]
        return split_stages(found, run.placed)

    def _of(self, run: Run, layer: Layer) -> LayerMemory:
        placed = run.homes.place(layer)
        key = id(layer.parts), placed
        if key not in self._memory:
            self._memory[key] = _layer_memory(run, layer, placed)
        return self._memory[key]

    def costs(self, run: Run, layer: Layer, memory: LayerMemory) -> LayerCosts:
        if id(memory) not in self._costs:
            self._costs[id(memory)] = _layer_costs(run, memory)
        return replace(self._costs[id(memory)], name=layer.name)


def step_costs(run: Run, known: Known | None = None) -> StepCosts:
    """Everything that the replay needs of one step of one pipeline group."""
    layout, cluster, microbatches = run.layout, run.cluster, run.microbatches
    if microbatches * layout.stages > MOST_ACTIONS:
        raise ValueError(
            f"{microbatches} microbatches on {layout.stages} stages: expected at most {MOST_ACTIONS:,} in all"
        )
    known = known or Known(run)
    stages = known.stages(run)
    return StepCosts(
        ranks=tuple(_rank(run, plan, stages, known) for plan in plans_of(run)),
        machine=Machine(
            link=cluster.host,
            overlaps_dispatch=run.overlaps_dispatch,
            beside_compute=cluster.node.beside_compute,
            taken_by_dispatch=cluster.node.dispatch_processors / cluster.device.processors,
            margin=run.framework.margin,
        ),
    )


def rank_peaks(run: Run) -> list[RankPeak]:
    """The peak of every pipeline rank, by what holds it."""
    stages = Known(run).stages(run)
    return [_peak(run, plan, stages) for plan in plans_of(run)]


def plans_of(run: Run) -> tuple[Plan, ...]:
    """The plans of all ranks."""
    layout = run.layout
    # The order of `pagestash.pipeline.overlapped_schedule`.
    pairs = run.overlaps_dispatch and run.framework.name == "pagestash" and layout.pp > 1
    pairs = pairs and layout.schedule in ("1F1B", "Interleaved1F1B")
    return _plans(layout.schedule, layout.pp, run.microbatches, layout.vpp, pairs)


@lru_cache(maxsize=64)
def _plans(schedule: str, ranks: int, microbatches: int, vpp: int, overlap: bool) -> tuple[Plan, ...]:
    """A search asks for the same ones again and again."""
    chunks = None if vpp == 1 else vpp
    found = plans(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks, overlap=overlap)
    return tuple(found)


def split_stages(layers: Sequence[T], placed: Sequence[int]) -> list[list[T]]:
    """The layers of each stage; the embedding is on the first, multi-token prediction and the head on the last."""
    embedding, *blocks, head = layers
    stages = [blocks[first:last] for first, last in pairwise(accumulate(placed, initial=0))]
    stages[0] = [embedding, *stages[0]]
    stages[-1] = [*stages[-1], *blocks[sum(placed) :], head]
    return stages


def _layer_memory(run: Run, layer: Layer, placed: Sequence[Placed]) -> LayerMemory:
    return LayerMemory(
        layer=layer,
        placed=placed,
        stream=run.stream_bytes,
        rows=run.held_rows,
        capacity=run.capacity,
        product_workspace=run.cluster.device.product_workspace,
        graphed=graphed_parts(run),
        delayed=run.element_bytes if run.delays_weight_gradients else 0,
    )


Stages = Sequence[Sequence[tuple[Layer, LayerMemory]]]


def _peak(run: Run, plan: Plan, stages: Stages) -> RankPeak:
    own = [layer for stage in plan.stages for layer, _ in stages[stage]]
    found = rank_peak(
        plan,
        {stage: [memory for _, memory in stages[stage]] for stage in plan.stages},
        run.homes.pool,
        static_bytes(own, run.layout, run.parameters),
        margin=run.framework.margin,
        follows=run.layout.pp > 1,
        overlaps=run.overlaps_dispatch,
    )
    more = run.cluster.calibration.allocated - 1
    return replace(found, groups={**found.groups, "calibrated": round(more * found.total)}) if more else found


def _rank(run: Run, plan: Plan, stages: Stages, known: Known) -> RankCosts:
    peak, cluster, last = _peak(run, plan, stages), run.cluster, run.layout.stages - 1
    own = [layer for stage in plan.stages for layer, _ in stages[stage]]
    each, groups = run.parameters, peak.groups
    updated = cluster.kernel_seconds(2 * groups["optimizer"] + groups["gradients"] + groups["weights"])
    launched = cluster.host.launch * step_launches(own, run.framework)
    send = cluster.node.latency + run.stream_bytes / cluster.send_rate(run.layout.stage_ranks)
    return RankCosts(
        stages=tuple(
            StageCosts(
                stage=stage,
                layers=tuple(known.costs(run, *layer) for layer in stages[stage]),
                send_seconds=send if stage < last else 0.0,
            )
            for stage in plan.stages
        ),
        plan=plan,
        peak=peak,
        outside=cluster.device.outside,
        end_seconds=_shared_seconds(run, own, each.gradient + each.weight) + max(updated, launched),
    )


def _shared_seconds(run: Run, layers: Sequence[Layer], each: float) -> float:
    """Of gathering or reducing `each` bytes a parameter over the parameter's data parallel group."""
    (dense, expert), layout, gather = parameters_of(layers), run.layout, run.cluster.gather_seconds
    return gather(each * dense, layout.dense_group, layout.tp) + gather(
        each * expert, layout.expert_group, layout.ep
    )


def _layer_costs(run: Run, memory: LayerMemory) -> LayerCosts:
    layer, cluster, placed = memory.layer, run.cluster, memory.placed
    seconds = Seconds(run)

    def amount(values: Iterable[tuple[float, bool]], rows: float) -> Amount:
        """Of values, and whether each is in proportion to rows."""
        found = list(values)
        fixed = sum(value for value, routed in found if not routed)
        return Amount(fixed, rows * sum(value for value, routed in found if routed))

    def hottest(each: Callable[[Part], float]) -> Amount:
        return amount(((each(part), part.routed) for part in layer.parts), run.skew)

    def saved(home: HomeName, rows: float) -> Amount:
        return amount(((item.bytes, item.routed) for item in placed if item.home == home), rows)

    dropped = [item for item in placed if item.home == "recompute"]
    makers, whole = {item.maker for item in dropped}, {item.scope for item in dropped if item.reruns}
    again = {part.name: repeated(part, makers, whole) for part in layer.parts}
    launched, relaunched = launch_seconds(run, layer, again, len({item.scope for item in dropped}))
    return LayerCosts(
        name=layer.name,
        forward=hottest(seconds.forward),
        backward_input=hottest(seconds.backward_input),
        backward_weight=hottest(seconds.backward_weight),
        recompute=hottest(lambda part: again[part.name] * seconds.forward(part)).total,
        dispatches_again=bool(whole & {"", "moe"}),
        dispatch_seconds=dispatch_seconds(run) if layer.dispatch_bytes else 0.0,
        waits_for_rows=run.framework.waits_for_rows and not run.capacity,
        gather_seconds=_shared_seconds(run, [layer], run.parameters.weight) if run.layout.zero == 3 else 0.0,
        saved={home: saved(home, run.held_rows) for home in HOMES},
        stash_seconds=saved("stash", run.skew).total * (2 / cluster.memory_rate),
        offload_seconds=saved("offload", run.skew) * (1 / cluster.memory_rate),
        workspace=memory.backward[0],
        launch_seconds=launched,
        relaunch_seconds=relaunched,
    )
