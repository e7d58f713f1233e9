"""Plans for steps that were profiled on an H200: 8 layers of Qwen3-30B-A3B, 2 × 4096 tokens, in loops and graphs.

A search that gets worse shows here: every other test has small layers, or few of them. (When two of the three were
recorded, loops were not measured: their `loop_seconds` are what the device took for a step alone.)
"""

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.tiers import slow

import pagestash as ps
from pagestash.planning import search
from pagestash.planning.budget import base_bytes, parse_budget
from pagestash.planning.choose import choose, find_candidates, predictor_of
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.make import plan_step
from pagestash.planning.predict import predict
from pagestash.planning.prediction import RuleTable

PROFILES = Path(__file__).parent / "profiles"
HOST = 100 << 30


def load(name, folder):
    path = folder / f"{name}.json"
    path.write_bytes(gzip.decompress((PROFILES / f"{name}.json.gz").read_bytes()))
    return ps.Profile.load(path)


@cache
def searched(name, folder, graphed=True):
    """The profile, the step without a policy, and what a plan for some bytes is predicted to take."""
    profile = load(name, folder)
    step = MeasuredStep(profile, base_bytes(profile, 0), graphed=graphed, loops=True)
    unplanned = predictor_of(step).predict(RuleTable({}, ps.PoolConfig()))
    found = find_candidates(step, HOST)

    def planned(budget):
        limit = parse_budget(budget, unplanned, profile.device) if isinstance(budget, float) else budget
        return choose(step, unplanned, limit, HOST, found).predicted

    return profile, unplanned, planned


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


BARS = {
    "qwen3-30b-a3b": {0.75: 1.02, 0.5: 1.06, 0.35: 1.18},
    "hf-qwen3-30b-a3b": {0.75: 1.02, 0.5: 1.05, 0.35: 1.08},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", *slow("hf-qwen3-30b-a3b")])
def test_parts_of_the_bytes_cost_little(folder, name):
    _, unplanned, planned = searched(name, folder)
    found = {part: planned(part).mean_seconds / unplanned.mean_seconds for part in BARS[name]}
    assert all(found[part] <= bar for part, bar in BARS[name].items()), found


LOOP_BARS = {
    "qwen3-30b-a3b": {0.75: 1.02, 0.5: 1.07, 0.35: 1.18},
    "hf-qwen3-30b-a3b": {0.75: 1.02, 0.5: 1.07, 0.35: 1.125, 0.3: 1.17},
}
"""Of steps that follow each other. Their host is busy: it takes half of the device's time without a policy and
more with one. (The last two were 1.095 and 1.115 where no saved tensor took any that does not move.)"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOP_BARS)
def test_parts_of_the_bytes_cost_little_more_where_steps_follow_each_other(folder, name):
    _, unplanned, planned = searched(name, folder, graphed=False)
    found = {part: planned(part).mean_seconds / unplanned.mean_seconds for part in LOOP_BARS[name]}
    assert all(found[part] <= bar for part, bar in LOOP_BARS[name].items()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", BARS)
def test_more_memory_makes_no_plan_slower_though_rules_that_move_nothing_are_left_out(folder, name):
    """That is done to each budget's plan alone, and saves the host their hooks."""
    for graphed in (False, True):
        _, unplanned, planned = searched(name, folder, graphed=graphed)
        found = [planned(part / 100).mean_seconds for part in range(34, 101, 3)]
        assert found == sorted(found, reverse=True)
        assert found[-1] == unplanned.mean_seconds < found[0]


@pytest.mark.slow
def test_a_host_that_has_no_time_to_spare_gets_plans_with_few_launches(folder):
    """A search by what the device takes alone finds more than that."""
    profile = load("hf-qwen3-30b-a3b", folder)
    segments = [replace(own, host_seconds=1.08 * own.host_seconds) for own in profile.segments]
    profile = replace(profile, segments=segments, overhead=profile.overhead.scaled(1.08))
    step = MeasuredStep(profile, base_bytes(profile, 0), loops=True)
    found = find_candidates(step, HOST)
    unplanned = predictor_of(step).predict(RuleTable({}, ps.PoolConfig()))
    for part, bar in ((0.5, 1.10), (0.42, 1.13)):
        plan = choose(step, unplanned, parse_budget(part, unplanned, profile.device), HOST, found)
        assert plan.predicted.mean_seconds <= bar * unplanned.mean_seconds


@pytest.fixture
def less_effort(monkeypatch):
    """These tests search several times, and their bars do not depend on how good a search is."""
    monkeypatch.setattr(search, "MOST", 200)


@pytest.mark.slow
@pytest.mark.usefixtures("less_effort")
def test_a_plan_for_half_of_the_bytes_is_not_launched_just_in_time(folder):
    """A host that is slower by a tenth does not make it slower."""
    profile = load("hf-qwen3-30b-a3b", folder)
    step = MeasuredStep(profile, base_bytes(profile, 0), loops=True)
    plan = plan_step(step, budget=0.5, host=HOST)
    found = plan.predicted
    assert 1.1 * found.launch_seconds <= found.seconds <= 1.10 * plan.unplanned.seconds


def recompute(*names, layers="*"):
    return [ps.Rule(f"layers.{layers}.{name}", "recompute") for name in names]


NORMS = ("attn_norm", "mlp_norm")
CHAIN = recompute(*NORMS, "attn.qkv_linear", "attn.q_norm", "attn.k_norm", "attn.rope")
BY_HAND = {
    "attention and experts recomputed": recompute(*NORMS, "attn", "moe.moe_act"),
    "attention recomputed, experts offloaded": [
        *recompute(*NORMS, "attn"),
        ps.Rule("layers.*.moe.moe_act", "offload"),
    ],
    "what is cheap recomputed, experts offloaded": [*CHAIN, ps.Rule("layers.*.moe.moe_act", "offload")],
    "and one layer's experts recomputed": [
        *CHAIN,
        ps.Rule("layers.{0-6}.moe.moe_act", "offload"),
        *recompute("moe.moe_act", layers="7"),
    ],
    "norms recomputed, attention offloaded": [
        *recompute(*NORMS),
        ps.Rule("layers.*.attn.core_attn", "offload"),
        ps.Rule("layers.*.attn.attn_proj", "offload"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_a_plan_for_the_bytes_of_a_policy_by_hand_is_as_fast(folder, name):
    """To a hundredth: a search is no proof."""
    profile, _, planned = searched("qwen3-30b-a3b", folder)
    hand = predict(profile, ps.Policy(BY_HAND[name]), base_bytes=base_bytes(profile, 0), graphed=True)
    assert planned(hand.peak_bytes).mean_seconds <= 1.01 * hand.mean_seconds
