"""Seconds of modules: the roofline's, and a profile's scaled by it."""

import pytest
import torch

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.simulation.build import Run, step_costs
from pagestash.simulation.cluster import load_cluster
from pagestash.simulation.homes import PolicyHomes
from pagestash.simulation.layout import Layout
from pagestash.simulation.parts import Shape, layers_of
from pagestash.simulation.seconds import Seconds, factors

TINY = preset("tiny", layers=2)


@pytest.fixture(scope="module")
def profile():
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (1, 17))
    return ps.profile(Decoder(TINY), (tokens[:, :-1], tokens[:, 1:]), repeats=1)


@pytest.fixture
def shape():
    return Shape(config=TINY, layout=Layout(devices=1), sequence=16)


def test_a_profiled_step_takes_what_was_measured(profile, shape):
    cluster = load_cluster("h100", 1)
    timed = Seconds(cluster, factors=factors(profile, shape, cluster))
    layers = layers_of(shape)[1:-1]
    for inner in ("attn.core_attn", "mlp_norm", "moe.router"):
        measured = sum(
            region.forward_seconds for region in profile.regions if region.name.endswith(f".{inner}")
        )
        told = sum(timed.forward(part) for layer in layers for part in layer.parts if part.name == inner)
        if inner == "attn.core_attn":
            assert told > 0
        else:
            assert told == pytest.approx(measured)
    head = layers_of(shape)[-1].parts[-1]
    outside = next(region for region in profile.regions if not region.name)
    told = timed.forward(head) + timed.backward_input(head) + timed.backward_weight(head)
    assert told == pytest.approx(outside.forward_seconds + outside.backward_seconds)
    experts = sum(region.forward_seconds for region in profile.regions if ".moe.exp" in region.name)
    experts += sum(region.forward_seconds for region in profile.regions if ".moe.moe_act" in region.name)
    told = sum(
        timed.forward(part)
        for layer in layers
        for part in layer.parts
        if part.name in ("moe.experts", "moe.expert_fc1", "moe.moe_act", "moe.expert_fc2")
    )
    assert told == pytest.approx(experts)


def test_measured_times_scale_with_the_devices_roofline(profile, shape):
    cluster, faster = load_cluster("h100", 1), load_cluster("b200", 1)
    found = factors(profile, shape, cluster)
    big = Shape(config=preset("qwen3-30b-a3b", layers=1), layout=Layout(devices=1), sequence=4096)
    for part in layers_of(big)[1].parts:
        if part.operations > 1e11:
            one, other = (Seconds(c, factors=found).forward(part) for c in (cluster, faster))
            plain, quick = (Seconds(c).forward(part) for c in (cluster, faster))
            assert one / other == pytest.approx(plain / quick)
            assert one > other


def test_backward_is_about_twice_forward_and_fp8_is_faster():
    config = preset("deepseek-v3", layers=4)
    shape = Shape(config=config, layout=Layout(devices=8, ep=8), sequence=4096)
    layer = layers_of(shape)[-2]
    timed, quick = (Seconds(load_cluster("gb200", 8), precision) for precision in ("bf16", "mxfp8"))
    ahead = sum(timed.forward(part) for part in layer.parts)
    back = sum(timed.backward_input(part) + timed.backward_weight(part) for part in layer.parts)
    assert 1.5 * ahead < back < 3 * ahead
    assert 0.4 * ahead < sum(quick.forward(part) for part in layer.parts) < ahead


def test_tensor_parallel_collectives_cost_time():
    config = preset("qwen3-30b-a3b", layers=1)
    part = layers_of(Shape(config=config, layout=Layout(devices=4, tp=4), sequence=4096))[1].parts[1]
    cluster = load_cluster("h100", 4)
    with_them = Seconds(cluster, layout_tp=4).forward(part)
    assert with_them == pytest.approx(
        Seconds(cluster).forward(part) + sum(cluster.gather_seconds(size, 4) for size in part.gathers)
    )
    assert part.gathers


@pytest.mark.parametrize(
    ("match", "parts"),
    [
        ("layers.*.attn_norm", {"attn_norm"}),
        ("layers.*.moe.moe_act", {"moe.expert_fc1"}),
        ("layers.*.attn.core_attn", {"attn.core_attn"}),
    ],
)
def test_recompute_repeats_the_forward_of_what_it_brings_back(match, parts):
    config = preset("qwen3-30b-a3b", layers=2)
    policy = ps.Policy([ps.Rule(match, "recompute")])
    run = Run(
        config=config,
        cluster=load_cluster("h100", 8),
        layout=Layout(devices=8, ep=8),
        sequence=4096,
        global_batch=8,
        homes=PolicyHomes(policy),
    )
    layer = step_costs(run).stages[0].layers[1]
    timed = Seconds(run.cluster)
    own = sum(timed.forward(part) for part in layers_of(run.shape)[1].parts if part.name in parts)
    assert layer.recompute.at() == pytest.approx(own)


def test_recompute_of_whole_layers_repeats_nearly_their_forward():
    run = Run(
        config=preset("qwen3-30b-a3b", layers=2),
        cluster=load_cluster("h100", 1),
        layout=Layout(devices=1),
        sequence=4096,
        global_batch=1,
        homes=PolicyHomes(ps.Policy([ps.Rule("layers.*", "recompute")])),
    )
    layer = step_costs(run).stages[0].layers[1]
    assert 0.6 * layer.forward.at() < layer.recompute.at() <= layer.forward.at()
