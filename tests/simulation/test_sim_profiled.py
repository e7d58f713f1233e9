"""One rank is what `pagestash plan` predicts."""

from functools import cache
from itertools import combinations, product

import pytest
import torch
from support.profiled_stage import link_of_profile, moves_whole_groups, program_of_profile
from support.tiers import slow

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning.predict import predict
from pagestash.planning.prediction import Prediction
from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling import Link
from pagestash.schedules.plan import plans
from pagestash.simulation.costs.costs import Machine, RankCosts
from pagestash.simulation.replay.played import Replay
from pagestash.simulation.replay.replay import run_step


@cache
def profile(rate: float):
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    model = Decoder(preset("tiny", layers=6))
    model.initialise(0)
    return ps.profile(model, (tokens[:, :-1], tokens[:, 1:]), repeats=1, link=Link(out=rate, back=rate))


def replayed(found, policy: Policy) -> Replay:
    (plan,) = plans("1F1B", ranks=1, microbatches=1)
    machine = Machine(link=link_of_profile(found.link))
    return run_step([RankCosts(plan=plan)], [program_of_profile(found, policy)], machine)


def assert_equal(found, policy: Policy) -> Prediction:
    """The replay of one rank has the plan's bytes, and its seconds but for the rounding of their sum.

    In a replay a copy is known to be over when it is, as in a step that waits.
    """
    wanted, played = predict(found, policy, waits=True), replayed(found, policy)
    assert played.peak_bytes == wanted.peak_bytes
    assert played.ranks[0].host_bytes == wanted.host_bytes
    assert played.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    return wanted


def assert_equal_if_whole(found, policy: Policy) -> None:
    """Simulated layers have no groups of which a part stays: where something else keeps their storages, say."""
    if moves_whole_groups(found, policy):
        assert_equal(found, policy)


def policies(*rules: tuple[str, HomeName]) -> Policy:
    """Rules for a region of every layer, "" for the layer."""
    return Policy(
        [
            Rule(
                f"layers.*.{inner}" if inner else "layers.*",
                home,
                min_bytes=1024,
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
        assert_equal_if_whole(profile(rate), policies((region, home)))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_one_rank_equals_the_plan_for_pairs_of_regions(one, other):
    for home, another in product(HOMES, HOMES):
        assert_equal_if_whole(profile(1e8), policies((one, home), (other, another)))


def test_most_regions_are_compared():
    made = [policies((region, home)) for region in REGIONS for home in HOMES]
    assert sum(moves_whole_groups(profile(1e8), policy) for policy in made) > 0.8 * len(made)


def test_offload_lowers_the_peak_of_one_rank():
    found = profile(1e8)
    kept = assert_equal(found, Policy())
    for region in ("**", "attn.core_attn", "moe"):
        assert replayed(found, policies((region, "offload"))).peak_bytes < kept.peak_bytes


def test_waits_are_in_it():
    found = profile(1e7)
    policy = Policy([Rule("layers.**", "offload", min_bytes=1024)])
    assert predict(found, policy).wait_seconds > 0
    assert replayed(found, policy).seconds > 1.1 * replayed(found, Policy()).seconds
