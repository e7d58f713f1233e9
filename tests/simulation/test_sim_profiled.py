"""One rank is what `pagestash plan` predicts."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch
from support.profiled_stage import link_of_profile, program_of_profile
from support.tiers import slow

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning.make import plan_profile
from pagestash.planning.predict import predict
from pagestash.planning.prediction import Prediction
from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling import Link
from pagestash.schedules.plan import plans
from pagestash.simulation.replay.played import Replay
from pagestash.simulation.replay.replay import Machine, run_step


@cache
def profile(rate: float):
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    model = Decoder(preset("tiny", layers=6))
    model.initialise(0)
    return ps.profile(model, (tokens[:, :-1], tokens[:, 1:]), repeats=1, link=Link(out=rate, back=rate))


def replayed(found, policy: Policy) -> Replay:
    one = plans("1F1B", ranks=1, microbatches=1)
    machine = Machine(link=link_of_profile(found.link))
    return run_step(one, [program_of_profile(found, policy)], machine)


def assert_equal(found, policy: Policy) -> Prediction:
    """The replay of one rank has the plan's bytes, and its seconds but for the rounding of their sum.

    In a replay a copy is known to be over when it is, as in a step that waits.
    """
    wanted, played = predict(found, policy, waits=True), replayed(found, policy)
    assert played.peak_bytes == wanted.peak_bytes
    assert played.ranks[0].host_bytes == wanted.host_bytes
    assert played.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    return wanted


def policies(*rules: tuple[str, HomeName], fraction: float = 1.0) -> Policy:
    """Rules for a region of every layer, "" for the layer."""
    return Policy(
        [
            Rule(
                f"layers.*.{inner}" if inner else "layers.*",
                home,
                min_bytes=1024,
                fraction=fraction if home == "offload" else 1.0,
            )
            for inner, home in rules
        ]
    )


HOMES: tuple[HomeName, ...] = ("offload", "recompute", "stash")
INNER = (
    "attn",
    "attn.qkv_linear",
    "attn.core_attn",
    "attn.attn_proj",
    "mlp_norm",
    "mlp",
    "moe",
    "moe.router",
)
REGIONS = ("", "**", "attn_norm", "attn.**", "attn.q_norm", "moe.**", "moe.experts", "moe.expert_fc1", *INNER)
PAIRS = list(combinations(("attn", "attn.core_attn", "mlp_norm", "moe.router", "moe.experts"), 2))


@pytest.mark.parametrize("rate", [1e8, *slow(1e7, 1e9, 1e12)])
@pytest.mark.parametrize("region", REGIONS)
def test_one_rank_equals_the_plan_for_each_region_alone(rate, region):
    for home in HOMES:
        assert_equal(profile(rate), policies((region, home)))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_one_rank_equals_the_plan_for_pairs_of_regions(one, other):
    for home, another in product(HOMES, HOMES):
        assert_equal(profile(1e8), policies((one, home), (other, another)))


@pytest.mark.parametrize("fraction", [0.3, 0.8])
@pytest.mark.parametrize("region", REGIONS)
def test_one_rank_equals_the_plan_where_a_fraction_is_offloaded(region, fraction):
    assert_equal(profile(1e8), policies((region, "offload"), fraction=fraction))


def test_one_rank_equals_the_plan_with_what_the_allocator_said():
    """On a GPU a keeper knows how far memory is from its peak, and waits less for what leaves."""
    without = profile(1e7)
    alive = predict(without, Policy()).memory["keep"]
    beside = max(alive)  # in the middle of forward, as a large temporary tensor would be
    segments = [
        replace(segment, peak_bytes=own + (beside if at == len(alive) // 4 else 0), end_bytes=own)
        for at, (segment, own) in enumerate(zip(without.segments, alive))
    ]
    found = replace(without, segments=segments, device="cuda:0")
    policy = policies(("**", "offload"))
    wanted = assert_equal(found, policy)
    assert any(group.headroom for group in program_of_profile(found, policy).groups.values())
    assert wanted.wait_seconds < predict(without, policy).wait_seconds
    for region in REGIONS:
        assert_equal(found, policies((region, "offload")))
        assert_equal(found, policies((region, "offload"), fraction=0.5))


def test_offload_lowers_the_peak_of_one_rank():
    found = profile(1e8)
    kept = assert_equal(found, Policy())
    for region in ("**", "attn.core_attn", "moe"):
        assert replayed(found, policies((region, "offload"))).peak_bytes < kept.peak_bytes


@pytest.mark.parametrize("part", [*slow(0.9, 0.8), 0.7])
def test_one_rank_equals_what_was_planned(part):
    found = profile(1e9)
    planned = plan_profile(found, budget=part, host="1GiB")
    assert planned.policy.rules
    base = planned.predicted.memory["base"][0]  # weights and so on, which a replay has as static bytes
    assert assert_equal(found, planned.policy).peak_bytes == planned.predicted.peak_bytes - base


def test_waits_are_in_it():
    found = profile(1e7)
    policy = Policy([Rule("layers.**", "offload", min_bytes=1024)])
    assert predict(found, policy).wait_seconds > 0
    assert replayed(found, policy).seconds > 1.1 * replayed(found, Policy()).seconds
