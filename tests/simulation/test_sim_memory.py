"""Peaks of simulated ranks: partition's bytes, the keeper's offload, ZeRO, recompute, pools."""

from dataclasses import replace

import pytest
from support.simulated import one_batch

from pagestash.models.config import preset
from pagestash.models.costs import layer_costs
from pagestash.pipeline.stages import partition
from pagestash.policy import Policy, PoolConfig, Rule
from pagestash.schedules.plan import plans
from pagestash.simulation.cluster.cluster import load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import rank_peaks, step_costs
from pagestash.simulation.costs.memory import LayerMemory, rank_peak
from pagestash.simulation.model.framework import FRAMEWORKS, ParameterBytes
from pagestash.simulation.model.homes import MegatronHomes, PolicyHomes
from pagestash.simulation.model.modules import layers_of, model_operations
from pagestash.simulation.model.run import Run

QWEN = preset("qwen3-30b-a3b", layers=8)


def run(**changes):
    layout = changes.pop("layout", Layout(devices=1))
    values = {
        "config": QWEN,
        "cluster": load_cluster("h100", layout.devices),
        "layout": layout,
        "sequence": 4096,
        "global_batch": 8 * layout.dp,
    }
    return Run(**values | changes)


def policy(*rules, **pool):
    return PolicyHomes(Policy([Rule(*rule) for rule in rules], PoolConfig(**pool)))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_bytes_are_those_of_partition(schedule):
    stages, ranks = (4, 4) if schedule in ("GPipe", "1F1B") else (8, 4)
    costs = layer_costs(QWEN, tokens=4096, parameter_bytes=18)
    placed = partition(costs, stages, schedule, microbatches=16)
    layout = Layout(devices=ranks, pp=ranks, vpp=stages // ranks, schedule=schedule)
    shape = one_batch(QWEN, layout, sequence=4096)
    bare = {  # no module takes anything of its own, so that what is held is all there is
        layer.name: replace(
            layer, parts=tuple(replace(p, temporary=0, weight_gradient=0, products=()) for p in layer.parts)
        )
        for layer in layers_of(shape)
    }
    memory = [
        [LayerMemory(layer=bare[n], placed=PolicyHomes().place(bare[n]), stream=0) for n in stage.layers]
        for stage in placed.stages
    ]
    for rank, plan in enumerate(plans(schedule, ranks=ranks, microbatches=16)):
        own = {stage: memory[stage] for stage in plan.stages}
        parameters = sum(held.layer.parameters for layers in own.values() for held in layers)
        static = {"parameters": 18 * parameters}
        peak = rank_peak(plan, own, PoolConfig(), static, follows=True)
        assert peak.total == placed.peaks[rank]


def test_zero_divides_one_state_after_another():
    totals = []
    for zero in (0, 1, 2, 3):
        groups = rank_peaks(run(layout=Layout(devices=8, ep=4, zero=zero)))[0].groups
        totals.append([groups[name] for name in ("weights", "gradients", "optimizer")])
    for zero, (weights, gradients, optimizer) in enumerate(totals):
        assert (optimizer < totals[0][2]) == (zero >= 1)
        assert (gradients < totals[0][1]) == (zero >= 2)
        assert (weights < totals[0][0]) == (zero >= 3)
    layers = layers_of(run(layout=Layout(devices=8, ep=4)))
    dense = sum(p.parameters for layer in layers for p in layer.parts if not p.expert)
    expert = sum(p.parameters for layer in layers for p in layer.parts if p.expert)
    assert totals[1][2] == round(12 * (dense / 8 + expert / 2))


def test_offloaded_bytes_leave_but_for_the_keepers_window():
    rule = ("layers.*.attn.core_attn", "offload")
    kept, less = (rank_peaks(run(homes=homes))[0] for homes in (policy(), policy(rule)))
    core = next(p for p in layers_of(run())[1].parts if p.name == "attn.core_attn")
    group = sum(piece.bytes for piece in core.pieces if piece.bytes >= 2**20)
    assert less.host == 5 * group  # of 8 layers three stay: the window
    assert kept.total - less.total == less.host


def test_a_schedule_whose_backward_comes_at_once_moves_nothing():
    layout = Layout(devices=4, pp=4)
    rule = ("layers.*", "offload")
    found = rank_peaks(run(layout=layout, homes=policy(rule)))
    assert [peak.host > 0 for peak in found] == [True, True, True, False]


def test_recompute_drops_what_the_region_makes_and_keeps_its_input():
    shape = run()
    layer = layers_of(shape)[1]
    whole = policy(("layers.*", "recompute")).place(layer)
    held = sum(item.bytes for item in whole if item.home == "keep")
    assert held == shape.stream_bytes + 4 * 4 * QWEN.top_k * shape.tokens  # the input; routes and permutation
    norms = policy(("layers.*.attn_norm", "recompute"), ("layers.*.mlp_norm", "recompute")).place(layer)
    dropped = sum(item.bytes for item in norms if item.home == "recompute")
    assert dropped == 2 * shape.stream_bytes + 2 * 4 * shape.tokens  # both outputs, both norms' statistics


def test_a_stashed_step_in_static_buffers_holds_valid_rows():
    homes = policy(("layers.*.moe.moe_act", "stash"), headroom=1.2)
    exact, padded, stashed = (
        rank_peaks(run(homes=policy() if at < 2 else homes, capacity=capacity))[0]
        for at, capacity in enumerate((0.0, 4.0, 4.0))
    )
    rows = sum(p.saved for layer in layers_of(run()) for p in layer.parts if p.name == "moe.moe_act")
    assert padded.groups["kept"] - exact.groups["kept"] == 3 * rows
    assert stashed.groups["pool"] == int(1.2 * rows)
    assert stashed.groups["kept"] == exact.groups["kept"] - rows
    assert exact.total < stashed.total < padded.total


def test_weight_gradients_do_not_grow_with_the_capacity_of_buffers():
    layer = layers_of(run(layout=Layout(devices=8, ep=8)))[1]
    bare = replace(layer, parts=tuple(replace(part, temporary=0, pieces=()) for part in layer.parts))
    most = [LayerMemory(layer=bare, placed=(), stream=0, capacity=rows).backward[0] for rows in (1.0, 4.0)]
    assert most[0] == most[1] == max(part.weight_gradient for part in layer.parts) > 0


def test_megatrons_names_drop_and_move_its_tensors():
    layout = Layout(devices=16, ep=16)
    values = {"layout": layout, "framework": FRAMEWORKS["megatron"], "global_batch": 16}
    kept, act, moved = (
        rank_peaks(run(homes=homes, **values))[0]
        for homes in (
            MegatronHomes(),
            MegatronHomes(recompute=["moe_act"]),
            MegatronHomes(offload=["moe_act"]),
        )
    )
    rows = 4096 * QWEN.top_k
    assert kept.groups["kept"] - act.groups["kept"] == 8 * 2 * rows * QWEN.expert_width
    assert moved.host == 7 * 4 * rows * QWEN.expert_width  # the last group stays
    with pytest.raises(ValueError, match="unknown module 'everything'"):
        MegatronHomes(recompute=["everything"])


def test_costs_of_a_step_are_whole():
    layout = Layout(devices=8, pp=2, ep=4, vpp=2, schedule="Interleaved1F1B")
    homes = policy(("layers.*.moe.moe_act", "recompute"), ("layers.*.attn.core_attn", "offload"))
    costs = step_costs(run(layout=layout, homes=homes))
    assert [stage.stage for stage in costs.stages] == [0, 1, 2, 3]
    assert [len(stage.layers) for stage in costs.stages] == [3, 2, 2, 3]
    layer = costs.stages[1].layers[0]
    assert layer.forward.routed > 0
    assert layer.backward_weight.routed > 0
    assert layer.recompute > 0
    rows = 4096 * QWEN.top_k
    sent = layers_of(run(layout=layout))[1].dispatch_bytes
    assert sent == 2 * rows * QWEN.width * 3 / 4
    assert layer.bytes_of("recompute").routed == 4 * rows * QWEN.expert_width
    total = sum(layer.bytes_of(home).total for home in ("keep", "stash", "offload", "recompute"))
    assert total == layers_of(run(layout=layout))[1].saved
    assert costs.stages[-1].send_seconds == 0 < costs.stages[0].send_seconds
    assert [rank.peak for rank in costs.ranks] == rank_peaks(run(layout=layout, homes=homes))


def test_model_operations_do_not_depend_on_the_layout():
    one = model_operations(run(layout=Layout(devices=4), global_batch=32))
    for layout in (Layout(devices=4, tp=4), Layout(devices=4, cp=2, ep=2), Layout(devices=4, pp=4)):
        assert model_operations(run(layout=layout, global_batch=32)) == pytest.approx(one)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"capacity": 0.5}, "capacity=0.5: expected at least 1"),
        ({"cluster": load_cluster("h100", 4)}, "a layout of 1 devices on a cluster of 4"),
        ({"global_batch": 10**7}, "expected at most 2,000,000"),
        ({"placement": [4]}, "expected 1 stages with 8 layers"),
    ],
)
def test_a_run_that_cannot_be_is_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        step_costs(run(**changes))


def test_a_hot_rank_takes_longer_and_a_full_one_holds_more():
    layout = Layout(devices=8, ep=8)
    even, hot = (run(layout=layout, skew=skew) for skew in (1.0, 2.0))
    assert hot.held_rows == 1 + 1 / 8**0.5
    (before,), (after,) = rank_peaks(even), rank_peaks(hot)
    routed = sum(part.saved for layer in layers_of(even) for part in layer.parts if part.routed)
    assert after.groups["kept"] - before.groups["kept"] == pytest.approx((hot.held_rows - 1) * routed)
    one, other = (step_costs(made).stages[0].layers[1] for made in (even, hot))
    assert (other.forward.fixed, other.forward.routed) == (one.forward.fixed, 2 * one.forward.routed)
    latency = even.cluster.node.latency
    assert other.dispatch_seconds - latency == pytest.approx(2 * (one.dispatch_seconds - latency))
    padded = [rank_peaks(run(layout=layout, skew=skew, capacity=4.0))[0].total for skew in (1.0, 2.0)]
    assert padded[0] == padded[1]
    for changes, sentence in (({"skew": 0.5}, "skew=0.5: expected 1"), ({"skew": 9.0}, r"to EP 8 \(one")):
        with pytest.raises(ValueError, match=sentence):
            run(layout=layout, **changes)


def test_sharded_weights_are_whole_while_their_layer_runs():
    found = [rank_peaks(run(layout=Layout(devices=8, zero=zero)))[0].groups for zero in (1, 2, 3)]
    largest = max(layer.parameters for layer in layers_of(run()))
    assert [groups.get("gathered", 0) for groups in found] == [0, 4 * largest, (4 + 2 * 2) * largest]


def test_bytes_a_parameter_are_not_negative():
    with pytest.raises(ValueError, match="weight=-1 bytes a parameter"):
        ParameterBytes(weight=-1)


def test_static_bytes_are_those_of_a_sum_by_hand():
    """Qwen3-235B on 64 devices, TP2 PP4 EP16: the embedding and 24 layers are on the first rank."""
    config = replace(
        preset("qwen3-30b-a3b"), layers=94, width=4096, heads=64, kv_heads=4, head_dim=128, expert_width=1536
    )
    found = rank_peaks(run(config=config, layout=Layout(devices=64, tp=2, pp=4, ep=16)))[0].groups
    attention = 4096 * (64 + 2 * 4) * 128 / 2 + 64 * 128 * 4096 / 2
    others = 2 * 4096 + 2 * 128 + 4096 * 128  # norms and router, which tensor parallel ranks do not share
    dense = 151_936 * 4096 / 2 + 24 * (attention + others)
    experts = 24 * 128 / 16 * 3 * 4096 * 1536
    told = {
        "weights": 2 * (dense + experts),
        "gradients": 4 * (dense + experts),
        "optimizer": 12 * (dense / 8 + experts),  # 8 ranks share dense state, one has each expert
    }
    for name, size in told.items():
        assert found[name] == pytest.approx(size, rel=1e-6)
