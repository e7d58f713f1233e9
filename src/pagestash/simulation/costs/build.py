"""`step_costs`: a model on a layout of a cluster, as the values that the replay reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise

from pagestash.policy import HOMES
from pagestash.schedules.plan import Plan, plans
from pagestash.simulation.costs.costs import Amount, LayerCosts, RankCosts, StageCosts, StaticBytes, StepCosts
from pagestash.simulation.costs.dispatch import dispatch_seconds
from pagestash.simulation.costs.homes import Placed
from pagestash.simulation.costs.launches import HostSeconds, graphed_parts, host_seconds, step_launches
from pagestash.simulation.costs.memory import (
    LayerMemory,
    RankPeak,
    StageMemory,
    gathered_bytes,
    rank_peak,
    static_bytes,
    step_bytes,
)
from pagestash.simulation.costs.run import Run
from pagestash.simulation.costs.seconds import Seconds, repeated
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.parts import Layer

MOST_ACTIONS = 2_000_000
"""Most microbatches × stages of a simulated step."""


class Known:
    """Layers and ranks whose costs were found before, for runs that differ in homes and microbatches alone.

    Layers with the same parts and the same homes are alike: they are costed once.
    """

    def __init__(self, run: Run) -> None:
        self.layers = layers_of(run.shape)
        self._numbers: dict[tuple[int, tuple[Placed, ...]], int] = {}
        self._costs: dict[int, LayerCosts] = {}
        self._ranks: dict[tuple[object, ...], RankCosts] = {}

    def number(self, memory: LayerMemory) -> int:
        """The same for layers that are alike. Parts stay alive with `layers`, so that they have their identity."""
        return self._numbers.setdefault((id(memory.layer.parts), memory.placed), len(self._numbers))

    def layer(self, memory: LayerMemory, made: Callable[[LayerMemory], LayerCosts]) -> LayerCosts:
        number = self.number(memory)
        if number not in self._costs:
            self._costs[number] = made(memory)
        return replace(self._costs[number], name=memory.layer.name)

    def rank(self, key: tuple[object, ...], made: Callable[[], RankCosts]) -> RankCosts:
        if key not in self._ranks:
            self._ranks[key] = made()
        return self._ranks[key]


def step_costs(run: Run, known: Known | None = None) -> StepCosts:
    """Everything that the replay needs of one step of one pipeline group."""
    layout, microbatches, placed = run.layout, run.microbatches, run.placed
    if microbatches * layout.stages > MOST_ACTIONS:
        raise ValueError(
            f"{microbatches} microbatches on {layout.stages} stages: expected at most {MOST_ACTIONS:,} in all"
        )
    found = _plans(layout.schedule, layout.pp, microbatches, layout.vpp, _in_pairs(run))
    known = known or Known(run)
    stages = _split(known.layers, placed)
    memory = [_stage_memory(run, index, own) for index, own in enumerate(stages)]
    ranks = [
        known.rank(
            (rank, run.microbatches, run.homes.pool, _alike(plan, memory, known)),
            partial(_rank, run, rank, plan, stages, memory, known),
        )
        for rank, plan in enumerate(found)
    ]
    shared = layout.tp * layout.cp * layout.dp * microbatches
    return StepCosts(
        schedule=layout.schedule,
        microbatches=microbatches,
        ranks=tuple(ranks),
        host=run.cluster.host_link,
        send_rate=run.cluster.send_rate(layout.stage_ranks),
        send_latency=run.cluster.node.latency,
        tokens=run.global_batch * run.sequence,
        model_operations=3 * shared * sum(layer.operations for layer in known.layers),
        devices=layout.devices,
        overlaps_dispatch=run.overlaps_dispatch,
        beside_compute=run.cluster.node.beside_compute,
        taken_by_dispatch=run.cluster.node.dispatch_processors / run.cluster.device.processors,
        margin=run.framework.margin,
        waits_for_rows=run.framework.waits_for_rows and not run.capacity,
        memory_rate=run.cluster.memory_rate,
    )


def with_microbatches(costs: StepCosts, run: Run) -> StepCosts:
    """The costs of a run that differs in its number of microbatches alone, but for what depends on the peak."""
    layout, count = run.layout, run.microbatches
    found = _plans(layout.schedule, layout.pp, count, layout.vpp, _in_pairs(run))
    return replace(
        costs,
        microbatches=count,
        ranks=tuple(replace(rank, plan=plan) for rank, plan in zip(costs.ranks, found)),
        tokens=run.global_batch * run.sequence,
        model_operations=costs.model_operations * count / costs.microbatches,
    )


def rank_peaks(run: Run) -> list[RankPeak]:
    """The peak of every pipeline rank, by what holds it."""
    layout = run.layout
    found = _plans(layout.schedule, layout.pp, run.microbatches, layout.vpp, _in_pairs(run))
    stages = _split(layers_of(run.shape), run.placed)
    memory = [_stage_memory(run, index, own) for index, own in enumerate(stages)]
    return [_peak(run, plan, stages, memory) for plan in found]


@lru_cache(maxsize=32)
def _plans(schedule: str, ranks: int, microbatches: int, vpp: int, overlap: bool) -> tuple[Plan, ...]:
    """The plans of all ranks; a search asks for the same ones again and again."""
    chunks = None if vpp == 1 else vpp
    found = plans(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks, overlap=overlap)
    return tuple(found)


def _in_pairs(run: Run) -> bool:
    """Whether a pipeline runs in the order of `pagestash.pipeline.overlapped_schedule`."""
    ours = run.overlaps_dispatch and run.framework.name == "pagestash"
    return ours and run.layout.pp > 1 and run.layout.schedule in ("1F1B", "Interleaved1F1B")


def _split(layers: Sequence[Layer], placed: Sequence[int]) -> list[list[Layer]]:
    """The layers of each stage; the embedding is on the first, multi-token prediction and the head on the last."""
    embedding, *blocks, head = layers
    stages = [blocks[first:last] for first, last in pairwise(accumulate(placed, initial=0))]
    stages[0] = [embedding, *stages[0]]
    stages[-1] = [*stages[-1], *blocks[sum(placed) :], head]
    return stages


def _layer_memory(run: Run, layer: Layer) -> LayerMemory:
    return LayerMemory(
        layer=layer,
        placed=tuple(run.homes.place(layer)),
        capacity=run.capacity,
        skew=run.skew,
        product_workspace=run.cluster.device.product_workspace,
        graphed=graphed_parts(run.graphs),
        delayed=run.shape.element_bytes if run.delays_weight_gradients else 0,
    )


def _stage_memory(run: Run, index: int, layers: Sequence[Layer]) -> StageMemory:
    made = tuple(_layer_memory(run, layer) for layer in layers)
    return StageMemory(stage=index, layers=made, stream=run.shape.stream_bytes)


def _peak(run: Run, plan: Plan, stages: Sequence[Sequence[Layer]], memory: Sequence[StageMemory]) -> RankPeak:
    own = [layer for stage in plan.stages for layer in stages[stage]]
    weights, gradients, optimizer = static_bytes(own, run.layout, run.parameters)
    static = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    gathered = gathered_bytes(own, run.layout, run.parameters)
    if gathered:
        static["gathered"] = gathered
    step = step_bytes(own, run.layout, run.parameters)
    own_memory = [memory[stage] for stage in plan.stages]
    found = rank_peak(
        plan,
        own_memory,
        run.homes,
        run.framework,
        static,
        follows=run.layout.pp > 1,
        overlaps=run.overlaps_dispatch,
        step=step,
    )
    more = run.cluster.calibration.allocated - 1
    return replace(found, groups={**found.groups, "calibrated": round(more * found.total)}) if more else found


def _alike(plan: Plan, memory: Sequence[StageMemory], known: Known) -> tuple[int, ...]:
    """A rank's layers, by what makes them alike."""
    return tuple(known.number(layer) for stage in plan.stages for layer in memory[stage].layers)


def _rank(
    run: Run,
    rank: int,
    plan: Plan,
    stages: Sequence[Sequence[Layer]],
    memory: Sequence[StageMemory],
    known: Known,
) -> RankCosts:
    peak = _peak(run, plan, stages, memory)
    own = [layer for stage in plan.stages for layer in stages[stage]]
    weights, gradients, optimizer = (peak.groups[name] for name in ("weights", "gradients", "optimizer"))
    outside = run.cluster.device.outside
    return RankCosts(
        rank=rank,
        stages=tuple(_stage_costs(run, rank, stage, memory[stage], known) for stage in plan.stages),
        plan=plan,
        static=StaticBytes(
            weights=weights, gradients=gradients, optimizer=optimizer, pool=peak.pool, outside=outside
        ),
        peak_bytes=peak.total,
        device_bytes=peak.total + outside,
        host_bytes=peak.host,
        leaving_bytes=peak.leaving,
        gradient_seconds=_gradient_seconds(run, own),
        optimizer_seconds=max(
            run.cluster.kernel_seconds(2 * optimizer + gradients + weights), _step_launch_seconds(run, own)
        ),
    )


def _step_launch_seconds(run: Run, layers: Sequence[Layer]) -> float:
    frame = run.framework
    found = step_launches(layers, loops=frame.loops_experts, each=frame.step_launches)
    return run.cluster.host.launch * found


def _gradient_seconds(run: Run, layers: Sequence[Layer]) -> float:
    """Gradients are reduced, and weights gathered, over each parameter's data parallel group."""
    layout, each = run.layout, run.parameters.gradient + run.parameters.weight
    dense = sum(part.parameters for layer in layers for part in layer.parts if not part.expert)
    expert = sum(part.parameters for layer in layers for part in layer.parts if part.expert)
    cluster = run.cluster
    return cluster.gather_seconds(each * dense, layout.dense_group, layout.tp) + cluster.gather_seconds(
        each * expert, layout.expert_group, layout.ep
    )


def _seconds(run: Run) -> Seconds:
    return Seconds(run.cluster, run.precision, run.layout.tp, run.layout.cp, run.factors)


def _stage_costs(run: Run, rank: int, stage: int, memory: StageMemory, known: Known) -> StageCosts:
    last = stage == run.layout.stages - 1
    return StageCosts(
        stage=stage,
        rank=rank,
        layers=tuple(known.layer(layer, partial(_layer_costs, run)) for layer in memory.layers),
        send_bytes=0 if last else run.shape.stream_bytes,
    )


def _layer_costs(run: Run, memory: LayerMemory) -> LayerCosts:
    layer, seconds, cluster = memory.layer, _seconds(run), run.cluster

    def total(name: str) -> Amount:
        way = getattr(seconds, name)
        return Amount(
            sum(way(part) for part in layer.parts if not part.routed),
            sum(way(part) for part in layer.parts if part.routed),
        )

    saved = {
        home: Amount(
            sum(item.bytes for item in memory.placed if item.home == home and not item.routed),
            sum(item.bytes for item in memory.placed if item.home == home and item.routed),
        )
        for home in HOMES
    }
    dropped = [item for item in memory.placed if item.home == "recompute"]
    makers, whole = {item.maker for item in dropped}, {item.scope for item in dropped if item.reruns}
    again = {part.name: repeated(part, makers, whole) for part in layer.parts}
    sent = layer.dispatch_bytes
    moved = dispatch_seconds(cluster, run.shape, run.dispatcher) if sent else 0.0
    weights = static_bytes([layer], run.layout, run.parameters)[0]
    return LayerCosts(
        name=layer.name,
        forward=total("forward"),
        backward_input=total("backward_input"),
        backward_weight=total("backward_weight"),
        recompute=Amount(*seconds.recompute(layer, again)),
        dispatches_again=bool(whole & {"", "moe"}),
        stash_seconds=saved["stash"] * (2 / cluster.memory_rate),
        dispatch_seconds=Amount(
            cluster.node.latency if moved else 0.0, max(0.0, moved - cluster.node.latency)
        ),
        combine_seconds=Amount(
            cluster.node.latency if moved else 0.0, max(0.0, moved - cluster.node.latency)
        ),
        gather_seconds=_weight_gather_seconds(run, layer) if run.layout.zero == 3 and weights else 0.0,
        saved=saved,
        workspace=Amount(float(memory.walk(run.shape.stream_bytes)[0])),
        host=_host_seconds(run, layer, again, memory),
    )


def _host_seconds(run: Run, layer: Layer, again: Mapping[str, float], memory: LayerMemory) -> HostSeconds:
    if run.factors:  # measured times have waits for the host in them
        return HostSeconds()
    scopes = {item.scope for item in memory.placed if item.home == "recompute"}
    return host_seconds(
        layer,
        launch=run.cluster.host.launch,
        loops=run.framework.loops_experts,
        casts=run.shape.quantized,
        scopes=run.graphs,
        repeated=again,
        regions=len(scopes),
        region=run.cluster.host.region,
    )


def _weight_gather_seconds(run: Run, layer: Layer) -> float:
    """Of gathering a layer's sharded weights (FSDP2)."""
    layout, each = run.layout, run.parameters.weight
    dense = sum(part.parameters for part in layer.parts if not part.expert)
    expert = sum(part.parameters for part in layer.parts if part.expert)
    return run.cluster.gather_seconds(
        each * dense, layout.dense_group, layout.tp
    ) + run.cluster.gather_seconds(each * expert, layout.expert_group, layout.ep)
