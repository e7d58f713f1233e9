"""Homes of a searched layout, planned further by the planner's own search."""

from dataclasses import replace
from functools import cache

import pytest

from pagestash.models.config import preset
from pagestash.simulation.build import Run, step_costs
from pagestash.simulation.choices import joined
from pagestash.simulation.cluster import read_cluster
from pagestash.simulation.homes import PolicyHomes
from pagestash.simulation.improved import improve, improved
from pagestash.simulation.layout import Layout
from pagestash.simulation.layouts import Bounded
from pagestash.simulation.modules import layers_of
from pagestash.simulation.search import Found, Search, try_layout
from pagestash.simulation.steady import step_seconds

GIB = 1 << 30
PLAIN = {"pp": 4, "ep": 8}
VIRTUAL = {"pp": 2, "ep": 8, "vpp": 2, "schedule": "Interleaved1F1B"}


def limited(less: int, **layout) -> Found:
    """A layout on devices with so many bytes less than its step takes without homes."""
    cluster = read_cluster("h100:32")
    made = Run(
        config=preset("deepseek-v3", 16),
        cluster=cluster,
        layout=Layout(devices=32, **layout),
        sequence=4096,
        global_batch=128,
    )
    most = max(rank.device_bytes for rank in step_costs(made).ranks)
    device = replace(cluster.device, memory=most - less)
    made = replace(made, cluster=replace(cluster, device=device))
    found = try_layout(Bounded(run=made, seconds=0.0, static=0, most=0.0, least=0.0))
    assert found is not None
    return found


@cache
def both(virtual: bool) -> tuple[Found, Found]:
    """Before and after."""
    before = limited(5 * GIB, **VIRTUAL if virtual else PLAIN)
    return before, improved(before)


@pytest.mark.parametrize("virtual", [False, True])
def test_the_planners_search_finds_faster_homes_that_fit(virtual):
    before, after = both(virtual)
    assert before.planned.lacks_bytes == after.planned.lacks_bytes == 0
    assert after.seconds < before.seconds
    memory = after.run.cluster.device.memory
    assert max(rank.device_bytes for rank in after.planned.costs.ranks) <= memory
    assert after.run.layout == before.run.layout
    assert after.run.global_batch == before.run.global_batch


@pytest.mark.parametrize("virtual", [False, True])
def test_the_ranks_policies_say_what_was_found(virtual):
    _, after = both(virtual)
    homes = PolicyHomes(joined(after.planned.policies))
    again = step_costs(replace(after.run, homes=homes))
    assert len(after.planned.policies) == after.run.layout.pp
    assert [rank.device_bytes for rank in again.ranks] == [r.device_bytes for r in after.planned.costs.ranks]
    assert step_seconds(replace(after.run, homes=homes))[1] == after.seconds
    regions = [f"{layer.name}.{part.name}" for layer in layers_of(after.run.shape) for part in layer.parts]
    names = [layer.name for layer in layers_of(after.run.shape)]
    for policy in after.planned.policies:
        policy.check([*regions, *names])


def test_every_rank_has_rules_for_its_own_layers_alone():
    _, after = both(False)
    for rank, policy in zip(after.planned.costs.ranks, after.planned.policies):
        own = {layer.name for stage in rank.stages for layer in stage.layers}
        for number in range(16):
            matched = any(
                rule.matches(f"layers.{number}.{region}") for rule in policy.rules for region in REGIONS
            )
            assert not matched or f"layers.{number}" in own


REGIONS = ("attn_norm", "mlp_norm", "attn.core_attn", "attn.qkv_linear", "moe.moe_act", "moe.expert_fc1")


def test_a_layout_that_fits_without_homes_or_with_none_stays_as_it_is():
    fits, lacks = limited(-1 * GIB, **PLAIN), limited(60 * GIB, **PLAIN)
    assert fits.played is not None
    assert lacks.played is None
    assert improved(fits) is fits
    assert improved(lacks) is lacks


def test_a_runner_up_with_better_homes_becomes_the_best():
    before, after = both(False)
    lacks = limited(60 * GIB, **PLAIN)
    rival = replace(
        before, seconds=(before.seconds + after.seconds) / 2, planned=limited(-1, **PLAIN).planned
    )
    lines: list[str] = []
    found = improve(Search(best=rival, others=(before, lacks), looked_at=3), progress=lines.append)
    assert found.best.seconds == after.seconds
    assert found.others == (rival, lacks)
    assert len(lines) == 2
