"""Seconds of modules by the roofline."""

from dataclasses import replace

import pytest
from support.simulated import one_batch

import pagestash as ps
from pagestash.models import preset
from pagestash.simulation.cluster.cluster import load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import step_costs
from pagestash.simulation.costs.seconds import Seconds
from pagestash.simulation.model.homes import PolicyHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.run import Run


def test_backward_is_about_twice_forward_and_fp8_is_faster():
    config = preset("deepseek-v3", layers=4)
    shape = one_batch(config, Layout(devices=8, ep=8), cluster="gb200", sequence=4096)
    layer = layers_of(shape)[-2]
    timed, quick = (Seconds(replace(shape, precision=precision)) for precision in ("bf16", "mxfp8"))
    ahead = sum(timed.forward(part) for part in layer.parts)
    back = sum(timed.backward_input(part) + timed.backward_weight(part) for part in layer.parts)
    assert 1.5 * ahead < back < 3 * ahead
    assert 0.4 * ahead < sum(quick.forward(part) for part in layer.parts) < ahead


def test_tensor_parallel_collectives_cost_time():
    config = preset("qwen3-30b-a3b", layers=1)
    made = one_batch(config, Layout(devices=4, tp=4), sequence=4096)
    part, timed = layers_of(made)[1].parts[1], Seconds(made)
    alone, kernel = timed.forward(replace(part, gathers=())), made.cluster.device.kernel
    shared = sum(made.cluster.gather_seconds(size, 4) + kernel for size in part.gathers)
    assert timed.forward(part) == pytest.approx(alone + shared)
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
    timed = Seconds(run)
    own = sum(timed.forward(part) for part in layers_of(run)[1].parts if part.name in parts)
    assert layer.recompute == pytest.approx(own)


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
    assert 0.6 * layer.forward.total < layer.recompute <= layer.forward.total
