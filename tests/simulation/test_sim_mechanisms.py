"""Overlap, CUDA graphs, launches, dispatchers and multi-token prediction: what each adds, and that none is free."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import one_batch

from pagestash.models import Decoder
from pagestash.models.config import preset
from pagestash.schedules.plan import plans
from pagestash.simulation.cluster.cluster import Cluster, load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import rank_peaks, step_costs
from pagestash.simulation.costs.dispatch import dispatch_seconds, needed
from pagestash.simulation.costs.launches import launches, step_launches
from pagestash.simulation.model.framework import FRAMEWORKS
from pagestash.simulation.model.homes import MegatronHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.run import GRAPHED, Run
from pagestash.simulation.replay.replay import replay
from pagestash.simulation.result import simulate

QWEN, DEEPSEEK = preset("qwen3-30b-a3b", layers=4), preset("deepseek-v3", layers=4)
MEGATRON = FRAMEWORKS["megatron"]


def run(config=QWEN, *, devices=8, framework=MEGATRON, homes=None, **changes):
    pp, vpp = changes.pop("pp", 1), changes.pop("vpp", 1)
    schedule = "1F1B" if vpp == 1 else "Interleaved1F1B"
    layout = Layout(devices=devices, ep=4, pp=pp, vpp=vpp, schedule=schedule)
    return Run(
        config=config,
        cluster=changes.pop("cluster", load_cluster("h100", devices)),
        layout=layout,
        sequence=changes.pop("sequence", 1024),
        global_batch=8 * layout.dp,
        framework=framework,
        homes=homes or MegatronHomes(),
        **changes,
    )


def host(cluster: Cluster, **changes) -> Cluster:
    return replace(cluster, host=replace(cluster.host, **changes))


def seconds(made: Run) -> float:
    return replay(step_costs(made)).seconds


def peaks(made: Run) -> list[int]:
    return [peak.total for peak in rank_peaks(made)]


RUNS = st.fixed_dictionaries(
    {
        "config": st.sampled_from([QWEN, DEEPSEEK]),
        "framework": st.sampled_from(list(FRAMEWORKS.values())),
        "sequence": st.sampled_from([256, 4096]),
        "precision": st.sampled_from(["bf16", "fp8"]),
    },
    optional={"homes": st.sampled_from([MegatronHomes(recompute=["moe_act"]), MegatronHomes(stash=True)])},
)
PIPES = st.sampled_from([(1, 1), (2, 1), (2, 2)])


# --- memory ---


@settings(max_examples=30, deadline=None)
@given(values=RUNS, pipe=PIPES, scope=st.sampled_from([*GRAPHED]))
def test_overlap_delayed_weight_gradients_and_graphs_never_take_less_memory(values, pipe, scope):
    plain = run(**values, pp=pipe[0], vpp=pipe[1])
    beside = replace(plain, overlaps_dispatch=True)
    late = replace(beside, delays_weight_gradients=True)
    graphed = replace(plain, graphs=(scope,))
    both = replace(late, graphs=(scope,))
    for less, more in ((plain, beside), (beside, late), (plain, graphed), (late, both), (graphed, both)):
        assert all(a <= b for a, b in zip(peaks(less), peaks(more), strict=True))


def test_overlap_adds_one_layer_and_the_rows_on_their_way():
    plain = run()
    layer = next(item for item in layers_of(plain) if item.name == "layers.1")
    (before,), (after,) = peaks(plain), peaks(replace(plain, overlaps_dispatch=True))
    assert after - before == layer.saved + round(2 * layer.dispatch_bytes)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_pipeline_of_ours_runs_in_the_order_of_its_overlapped_schedule(vpp):
    ours = replace(run(pp=2, vpp=vpp, framework=FRAMEWORKS["pagestash"]), overlaps_dispatch=True)
    sizes = {"ranks": 2, "microbatches": ours.microbatches, "chunks": None if vpp == 1 else vpp}
    name = ours.layout.schedule
    assert list(step_costs(ours).plans) == plans(name, **sizes, overlap=True)
    assert list(step_costs(replace(ours, framework=MEGATRON)).plans) == plans(name, **sizes)
    assert all(
        a <= b for a, b in zip(peaks(replace(ours, overlaps_dispatch=False)), peaks(ours), strict=True)
    )


def test_graphs_have_buffers_and_what_they_keep_is_not_free_in_backward():
    plain, graphed = run(pp=2, vpp=2), run(pp=2, vpp=2, graphs=("attn",))
    for before, after in zip(rank_peaks(plain), rank_peaks(graphed)):
        assert before.groups["kept"] == after.groups["kept"]
        assert "graphs" not in before.groups
        assert after.total >= before.total + after.groups["graphs"]
        assert after.groups["graphs"] > 2 * plain.stream_bytes


def test_an_unknown_graph_or_dispatcher_is_one_sentence():
    with pytest.raises(ValueError, match="graphs=moe: expected some of attn, router, mlp, or full"):
        run(graphs=("moe",))
    with pytest.raises(ValueError, match="dispatcher='nccl': expected alltoall or flex"):
        run(dispatcher="nccl")


# --- launches ---


@settings(max_examples=15, deadline=None)
@given(values=RUNS, pipe=PIPES)
def test_a_launch_that_takes_no_time_changes_nothing(values, pipe):
    """Without host seconds a step takes what its pieces take, and more of them never make it shorter."""
    plain = run(**values, pp=pipe[0], vpp=pipe[1])
    free = replace(plain, cluster=host(plain.cluster, launch=0.0, region=0.0))
    costs = step_costs(free)
    assert all(not layer.launch_seconds for stage in costs.stages for layer in stage.layers)
    times = [seconds(replace(plain, cluster=host(plain.cluster, launch=each))) for each in (0.0, 1e-6, 1e-3)]
    assert times == sorted(times)


def test_one_rank_without_launches_takes_the_sum_of_its_pieces():
    free = run(devices=4, cluster=host(load_cluster("h100", 4), launch=0.0, region=0.0))
    costs = step_costs(free)
    (rank,), (stage,) = costs.ranks, costs.stages
    kinds = ("forward", "backward_input", "backward_weight")
    own = sum(getattr(layer, kind).total for layer in stage.layers for kind in kinds)
    own += 4 * sum(layer.dispatch_seconds for layer in stage.layers)
    told = free.microbatches * own + rank.end_seconds
    assert replay(costs).seconds == pytest.approx(told)


def test_a_step_of_tiny_kernels_takes_as_long_as_its_launches():
    bound = run(devices=4, sequence=64, cluster=host(load_cluster("h100", 4), launch=1e-3, region=0.0))
    layers = layers_of(bound)
    count = 3 * sum(launches(part, loops=True) for layer in layers for part in layer.parts)
    step = step_launches(layers, MEGATRON)
    told = 1e-3 * (count * bound.microbatches + step)
    assert seconds(bound) == pytest.approx(told, rel=0.05)
    assert seconds(replace(bound, graphs=("attn",))) < seconds(replace(bound, graphs=()))
    assert seconds(replace(bound, graphs=("full",))) < 0.1 * told


def test_a_recomputed_region_costs_the_host_its_launches_and_its_records():
    made = run(devices=4, sequence=64, cluster=host(load_cluster("h100", 4), launch=1e-3, region=5e-3))
    again = replace(made, homes=MegatronHomes(recompute=["layernorm"]))
    regions = 2 * QWEN.layers * made.microbatches
    assert seconds(again) - seconds(made) == pytest.approx(regions * (1e-3 + 5e-3), rel=0.05)


def test_a_layer_of_megatron_has_as_many_launches_as_were_counted():
    shape = one_batch(preset("qwen3-30b-a3b"), Layout(devices=16, ep=16), sequence=4096, framework=MEGATRON)
    layer = layers_of(shape)[1]
    counted = 463_348 / (64 * 48)
    assert 3 * sum(launches(part, loops=True) for part in layer.parts) == pytest.approx(counted, rel=0.02)


# --- dispatch ---


@pytest.mark.parametrize(
    ("cluster", "ranks", "published"),
    [("h100", 16, 1485e-6), ("h100", 64, 4626e-6), ("gb200", 8, 391e-6), ("gb200", 64, 675e-6)],
)
def test_a_dispatcher_that_sends_a_token_once_takes_what_was_published(cluster, ranks, published):
    shape = one_batch(preset("deepseek-v3"), Layout(devices=ranks, ep=ranks), cluster=cluster, sequence=4096)
    once, every = (dispatch_seconds(replace(shape, dispatcher=way)) for way in ("flex", "alltoall"))
    assert once == pytest.approx(published, rel=0.13)
    assert once < every


def test_all_to_all_sorts_received_rows_by_expert_where_a_rank_has_several():
    made = run(config=replace(QWEN, experts=8))
    one = replace(made, config=replace(QWEN, experts=4, top_k=4))
    for own, sorts in ((made, True), (replace(made, dispatcher="flex"), False), (one, True)):
        plain = replace(own, framework=replace(MEGATRON, sorts_rows=False))
        first, other = (
            sum(part.traffic for layer in layers_of(item) for part in layer.parts) for item in (own, plain)
        )
        assert (first > other) is (sorts and own is made)


@given(parts=st.integers(1, 64), top_k=st.integers(1, 16))
def test_a_token_needs_a_part_of_the_experts_with_a_probability(parts, top_k):
    found = needed(parts, top_k)
    assert 0 < found <= 1
    assert found <= needed(parts, top_k + 1)
    assert parts * found <= min(parts, top_k) + 1e-9
    assert needed(1, top_k) == 1


# --- multi-token prediction ---


def test_no_further_tokens_are_the_model_as_it_was():
    shape = one_batch(DEEPSEEK, Layout(devices=1), sequence=1024)
    names = [layer.name for layer in layers_of(shape)]
    assert names == ["embed", *(f"layers.{index}" for index in range(4)), "head"]
    parts = {part.name for layer in layers_of(shape) for part in layer.parts}
    assert not any(name.startswith("mtp") for name in parts)


def test_a_further_token_costs_a_layer_a_projection_and_the_head_once_more():
    more = replace(DEEPSEEK, mtp_layers=1)
    one, two = (layers_of(one_batch(config, Layout(devices=1), sequence=1024)) for config in (DEEPSEEK, more))
    layer, further, head = one[-2], two[-2], two[-1]
    width = DEEPSEEK.width
    assert further.name == "layers.4"
    assert (
        sum(layer.parameters for layer in two) - sum(layer.parameters for layer in one)
        == layer.parameters + 2 * width**2 + 3 * width
    )
    joined = 2 * 1024 * 2 * width * width
    assert further.operations == layer.operations + head.operations + joined
    assert further.saved > layer.saved + head.saved


def test_further_tokens_are_on_the_last_rank_with_a_copy_of_the_embedding():
    plain = run(DEEPSEEK, pp=2)
    more = replace(plain, config=replace(DEEPSEEK, mtp_layers=1))
    (first, last), (same, larger) = peaks(plain), peaks(more)
    assert (first, larger > last) == (same, True)
    assert seconds(more) > seconds(plain)
    found = simulate(more)
    assert [row.layers for row in found.rows] == [2, 3]
    weights = [rank.peak.groups["weights"] for rank in step_costs(more).ranks]
    alone = [rank.peak.groups["weights"] for rank in step_costs(plain).ranks]
    further = layers_of(more)[-2].parameters
    assert further > DEEPSEEK.vocab * DEEPSEEK.width
    assert weights[1] - alone[1] == 2 * further


def test_a_decoder_refuses_further_tokens():
    with pytest.raises(ValueError, match="mtp_layers=1: a Decoder has none"):
        Decoder(replace(preset("tiny"), mtp_layers=1), device="meta")
