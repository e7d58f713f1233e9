"""Layers are placed so that the largest peak is smallest, then the largest time."""

import itertools
import random
import time

import pytest

from pagestash.pipeline.costs import LayerCost, read_costs
from pagestash.pipeline.stages import partition
from pagestash.schedules.plan import SCHEDULES, V_SHAPED, plans, stages_a_rank


def layer(name, parameters=10, activations=5, forward=1.0, backward=2.0):
    return LayerCost(
        name=name, parameters=parameters, activations=activations, forward=forward, backward=backward
    )


def random_layers(count, seed):
    draw = random.Random(seed)
    return [
        layer(f"layers.{i}", draw.randrange(40), draw.randrange(30), draw.randrange(9), draw.randrange(9))
        for i in range(count)
    ]


def peak(costs, cuts, plan):
    """Peak bytes of a rank, action by action: nothing that `partition` makes use of."""
    kept = {s: sum(c.parameters for c in costs[cuts[s] : cuts[s + 1]]) for s in plan.stages}
    size = {s: sum(c.activations for c in costs[cuts[s] : cuts[s + 1]]) for s in plan.stages}
    now = most = 0
    for action in plan.actions:
        now += {"F": 1, "I": 0}.get(action.kind, -1) * size[action.stage]
        most = max(most, now)
    return sum(kept.values()) + most


def worst(costs, cuts, ranks, memory=0):
    """The largest peak beyond `memory` and the largest time of a rank."""
    times = [sum(c.time for s in plan.stages for c in costs[cuts[s] : cuts[s + 1]]) for plan in ranks]
    return max(memory, *(peak(costs, cuts, plan) for plan in ranks)), max(times)


def cuts_of(placed):
    return (
        *(stage.first for stage in placed.stages),
        placed.stages[-1].first + len(placed.stages[-1].layers),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_better(name, seed):
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3]) if name not in ("GPipe", "1F1B") else draw.choice([1, 2, 4, 5])
    stages = ranks * stages_a_rank(name)
    costs = random_layers(draw.randrange(stages, stages + 5), seed)
    microbatches = draw.choice([2 * stages, 3 * stages])
    memory = draw.choice([0, sum(cost.parameters for cost in costs)])
    placed = partition(costs, stages, name, microbatches=microbatches, memory=memory)
    every = plans(name, ranks=ranks, microbatches=microbatches)
    best = min(
        worst(costs, (0, *cuts, len(costs)), every, memory)
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert placed.optimal
    assert worst(costs, cuts_of(placed), every, memory) == best
    assert (max(memory, *placed.peaks), max(placed.times)) == best


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_the_layers_in_order(name):
    costs = [layer("embed", 50, 1), *(layer(f"layers.{i}") for i in range(30)), layer("head", 50, 20)]
    placed = partition(costs, 8, name, microbatches=16)
    assert [n for stage in placed.stages for n in stage.layers] == [cost.name for cost in costs]
    assert all(stage.layers for stage in placed.stages)
    per = stages_a_rank(name)
    for stage in placed.stages:
        around = 7 - stage.index if stage.index > 3 else stage.index
        assert stage.rank == (around if name in V_SHAPED else stage.index % (8 // per))
        held = [c for c in costs if c.name in stage.layers]
        assert stage.parameters == sum(c.parameters for c in held)
        assert stage.activations == sum(c.activations for c in held)
    for rank, plan in enumerate(plans(name, ranks=8 // per, microbatches=16)):
        assert placed.peaks[rank] == peak(costs, cuts_of(placed), plan)
        assert tuple(stage.index for stage in placed.of_rank(rank)) == plan.stages


def test_a_stage_that_holds_more_microbatches_gets_fewer_layers():
    placed = partition([layer(f"layers.{i}", 1, 100) for i in range(25)], 4, "1F1B", microbatches=8)
    assert [len(stage.layers) for stage in placed.stages] == [3, 4, 6, 12]
    assert [stage.in_flight for stage in placed.stages] == [4, 3, 2, 1]


def test_embedding_and_head_take_the_place_of_layers():
    # No activations: memory is parameters alone, and head and embedding are worth three layers each.
    costs = [layer("embed", 30, 0), *(layer(f"layers.{i}", 10, 0) for i in range(14)), layer("head", 30, 0)]
    placed = partition(costs, 4, "1F1B")
    assert [len(stage.layers) for stage in placed.stages] == [3, 5, 5, 3]
    assert placed.peaks == (50, 50, 50, 50)


def test_time_decides_between_placements_of_equal_memory():
    # Parameters weigh nothing, so any cut is as good for memory; the slow layer stands alone.
    times = [1.0, 1.0, 1.0, 6.0]
    costs = [layer(f"layers.{i}", 0, 0, t, 0.0) for i, t in enumerate(times)]
    placed = partition(costs, 2, "GPipe")
    assert placed.times == (3.0, 6.0)


def test_up_to_the_memory_that_is_there_time_decides():
    costs = [layer(f"layers.{i}", 1, 100) for i in range(24)]
    tight = partition(costs, 4, "1F1B", microbatches=8)
    roomy = partition(costs, 4, "1F1B", microbatches=8, memory=2406)
    assert max(tight.times) > max(roomy.times) == 18.0
    assert [len(stage.layers) for stage in roomy.stages] == [6, 6, 6, 6]
    assert max(tight.peaks) < max(roomy.peaks) == 2406


def test_among_equals_stages_are_even():
    # The last layer bounds memory and time; the others could stand anywhere.
    same = [layer(f"layers.{i}", 1, 0, 1.0, 0.0) for i in range(12)]
    placed = partition([*same, layer("head", 100, 0, 100.0, 0.0)], 4, "GPipe")
    assert [len(stage.layers) for stage in placed.stages] == [4, 4, 4, 1]
    # Six layers a rank, on two stages: they need not be three each.
    for name in ("LoopedBFS", "ZBVZeroBubble"):
        assert [len(stage.layers) for stage in partition(same, 4, name).stages] == [3, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_many_layers_are_placed_at_once_and_well(name):
    big = [layer(f"layers.{i}", 3_000, 20) for i in range(254)]
    costs = [layer("embed", 5_000, 1), *big, layer("head", 5_000, 150)]
    begun = time.process_time()
    placed = partition(costs, 64, name, microbatches=128)
    # Half a second of a core's own time, however busy the machine is; a search over all placements takes hours.
    assert time.process_time() - begun < 60
    # Nobody can do better than to share everything out in pieces of any size, each at its lightest.
    total = sum(c.parameters for c in costs)
    light = min(stage.in_flight for stage in placed.stages)
    ideal = (total + light * sum(c.activations for c in costs)) / len(placed.peaks)
    heaviest = 3_000 + max(stage.in_flight for stage in placed.stages) * 20
    assert ideal <= max(placed.peaks)
    even = partition_evenly(costs, placed)
    assert max(placed.peaks) <= even
    assert max(placed.peaks) - min(placed.peaks) <= 2 * heaviest


def partition_evenly(costs, placed):
    """The largest peak with the same number of layers on every stage, as nearly as can be."""
    stages = len(placed.stages)
    cuts = [round(i * len(costs) / stages) for i in range(stages + 1)]
    ranks = plans(placed.schedule, ranks=len(placed.peaks), microbatches=placed.microbatches)
    return max(peak(costs, cuts, plan) for plan in ranks)


@pytest.mark.parametrize(
    ("stages", "name", "told"),
    [
        (9, "1F1B", "9 stages for 8 layers"),
        (0, "1F1B", "0 stages"),
        (5, "DualPipeV", "5 stages: DualPipeV has 2 per rank, so expected a multiple of 2"),
        (4, "Nonsense", "unknown schedule 'Nonsense'"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages, name, told):
    with pytest.raises(ValueError, match=told):
        partition([layer(str(i)) for i in range(8)], stages, name)


def test_costs_are_read_from_json():
    rows = {"embed": {"parameters": 8, "activations": 0}, "layers.0": {"parameters": 4, "activations": 2.0,
            "forward": 0.5, "backward": 1}}  # fmt: skip
    assert read_costs(rows) == [layer("embed", 8, 0, 0.0, 0.0), layer("layers.0", 4, 2, 0.5, 1)]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"layers.0": {"parameters": 4}}, r"layer 'layers.0': activations is missing"),
        ({"layers.0": {"parameters": "4", "activations": 1}}, "parameters='4': expected a number"),
        ({"layers.0": {"parameters": 4, "activations": -1}}, "activations=-1: expected at least 0"),
        ({"layers.0": 4}, "expected a table"),
        ([1, 2], "expected a table"),
    ],
)
def test_wrong_costs_are_refused(rows, told):
    with pytest.raises(ValueError, match=told):
        read_costs(rows)
