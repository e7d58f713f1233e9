"""`plan_pipeline`: layers are placed on ranks and every rank gets a policy, together."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from support.tiers import slow, sweep
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from test_plans import MB, made_up

import pagestash as ps
from pagestash.cli import app
from pagestash.models import Decoder, preset
from pagestash.pipeline import (
    SCHEDULES,
    plan_pipeline,
    planned,
    plans,
)
from pagestash.pipeline.cut import WholeModel
from pagestash.pipeline.planned import pipeline_seconds
from pagestash.planning import NothingFits
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import RuleTable
from pagestash.planning.rank import RankPredictor, RankStep
from pagestash.planning.stage import received

sizes = st.tuples(st.integers(1, 20).map(lambda n: n * MB), st.integers(1, 12))


def model(count=8, first=(8 * MB, 2), second=(5 * MB, 6), **options):
    """A profile, and what its layers weigh."""
    names = [*(f"layers.{n}" for n in range(count)), "head"]
    return made_up(count, first, second, **options), dict.fromkeys(names, 3 * MB)


def pipeline(profile_and_weights, schedule="1F1B", ranks=2, microbatches=4, **options):
    profile, weights = profile_and_weights
    return plan_pipeline(
        profile, schedule=schedule, ranks=ranks, microbatches=microbatches, parameters=weights, **options
    )


@pytest.mark.parametrize(
    "name",
    ["1F1B", "ZBVZeroBubble", *slow(*(each for each in SCHEDULES if each not in ("1F1B", "ZBVZeroBubble")))],
)
def test_bytes_in_flight_are_those_of_the_partition(name):
    found = pipeline(model(5), name, budget="1GiB")
    for own in found.ranks:
        assert own.plan.is_empty
        weights = sum(stage.parameters for stage in found.placed.of_rank(own.rank))
        assert weights == 3 * MB * len(own.layers)
        assert max(own.plan.unplanned.memory["keep"]) == found.placed.peaks[own.rank] - weights
        assert own.plan.unplanned.seconds == pytest.approx(4 * found.placed.times[own.rank])


@sweep(
    3, 10, sizes, sizes, st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B"]), st.sampled_from([0.5, 0.8])
)
def test_every_rank_is_within_its_budget(first, second, name, part):
    given = model(6, first, second)
    found = pipeline(given, name, budget=part)
    assert all(own.plan.predicted.peak_bytes <= found.budget_bytes for own in found.ranks)
    assert sorted(name for own in found.ranks for name in own.layers) == sorted(given[1])


def test_a_rank_with_more_microbatches_in_flight_keeps_less():
    found = pipeline(model(8), ranks=4, microbatches=8, budget=60 * MB, host=0)
    share = [
        own.plan.predicted.held_bytes["keep"] / sum(own.plan.predicted.held_bytes.values())
        for own in found.ranks
    ]
    assert share == sorted(share)
    assert share[0] < share[-1]
    assert len({str(own.plan.policy) for own in found.ranks}) > 1


@pytest.mark.slow
def test_placing_again_is_never_slower(monkeypatch):
    given = model(9, (8 * MB, 2), (5 * MB, 12))
    for budget in (50 * MB, 70 * MB, 100 * MB):
        again = pipeline(given, ranks=3, microbatches=6, budget=budget, host=0)
        with monkeypatch.context() as patch:
            patch.setattr(planned, "PARTS", ())
            once = pipeline(given, ranks=3, microbatches=6, budget=budget, host=0)
        assert once.rounds == 1
        assert again.rounds > 1
        assert again.seconds <= once.seconds


@pytest.mark.slow
@sweep(
    2,
    6,
    sizes,
    sizes,
    st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
    st.integers(2, 3),
    st.sampled_from([2e8, 2e10]),
)
def test_more_memory_is_never_slower(first, second, name, ranks, link):
    given = model(5, first, second, link=link)
    times = []
    for part in (0.2, 0.4, 0.5, 0.6, 1.0):
        try:
            found = pipeline(given, name, ranks=ranks, microbatches=6, budget=part)
        except NothingFits:
            assert not times
            continue
        assert max(own.plan.predicted.peak_bytes for own in found.ranks) <= found.budget_bytes
        times.append(found.seconds)
    assert times == sorted(times, reverse=True)


def test_a_step_is_as_long_as_the_actions_of_its_ranks_plans():
    """Also where a rank is planned for less memory than it has, because its actions are shorter then."""
    given = model(9, (8 * MB, 2), (5 * MB, 12), link=1e9)
    found = pipeline(given, ranks=3, microbatches=6, budget=0.4)
    assert {own.plan.budget_bytes for own in found.ranks} == {found.budget_bytes}
    orders = plans("1F1B", ranks=3, microbatches=6)
    whole = WholeModel(*given)
    seconds = []
    for own, stage in zip(found.ranks, found.placed.stages, strict=True):
        cut = whole.stage(stage.index, stage.first, stage.first + len(stage.layers))
        step = RankStep([cut], orders[own.rank])
        again = RankPredictor(step).predict(RuleTable.of(own.plan.policy, cut.profile.regions))
        seconds.append(step.action_seconds(again))
    assert pipeline_seconds(orders, seconds) == pytest.approx(found.seconds)


def test_the_plan_of_a_pipeline_is_the_same_each_time():
    one, other = (pipeline(model(), budget=0.5) for _ in range(2))
    assert one == other
    assert str(one) == str(other)
    assert "rank  layers" in str(one)


def test_if_nothing_fits_the_rank_is_named():
    with pytest.raises(NothingFits, match=r"nothing fits 19\.1 MiB: the smallest plan takes ") as refused:
        pipeline(model(workspace=10 * MB), budget=20 * MB)
    assert str(refused.value).startswith(f"rank {refused.value.rank}: ")


def test_a_step_waits_for_other_ranks():
    ranks, microbatches = 4, 8
    orders = plans("1F1B", ranks=ranks, microbatches=microbatches)
    seconds = [[1.0 if action.kind == "F" else 2.0 for action in order.actions] for order in orders]
    assert pipeline_seconds(orders, seconds) == pytest.approx(3 * (microbatches + ranks - 1))
    alone = plans("GPipe", ranks=1, microbatches=3)
    assert pipeline_seconds(alone, [[1.0] * 6]) == pytest.approx(6)
    for name in SCHEDULES:  # none waits for itself
        orders = plans(name, ranks=2, microbatches=6)
        took = pipeline_seconds(orders, [[1.0] * len(order.actions) for order in orders])
        assert took >= max(len(order.actions) for order in orders)


# --- a model ---


@cache
def measured():
    config = preset("tiny", layers=4)
    whole = Decoder(config)
    whole.initialise(0)
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :-1], tokens[:, 1:]
    return config, given, ps.profile(whole, given, repeats=1)


def test_a_stage_cut_out_of_a_model_saves_what_the_stage_saves_by_itself():
    config, (tokens, labels), profile = measured()
    cut = WholeModel(profile)
    assert [layer.name for layer in cut.layers] == ["embed", *(f"layers.{n}" for n in range(4)), "head"]
    assert sum(layer.parameters for layer in cut.layers) == profile.gradient_bytes
    hidden = torch.randn(2, 64, config.width)
    parts = [(0, 2, tokens), (2, 4, received(hidden)), (4, 6, (received(hidden), labels))]
    for index, (first, end, batch) in enumerate(parts):
        stage = cut.stage(index, first, end)
        alone = Decoder(config, part=[layer.name for layer in cut.layers[first:end]])
        alone.initialise(0)
        own = ps.profile(alone, batch, repeats=1)
        weights = sum(layer.parameters for layer in cut.layers[first:end])
        assert weights == own.gradient_bytes == stage.profile.gradient_bytes
        assert stage.received_bytes == (hidden.nbytes if index else 0)
        assert stage.result_bytes == (hidden.nbytes if index < 2 else 0)
        # By itself a stage does not count its input: the caller has it.
        assert stage.profile.total_bytes - stage.received_bytes == own.total_bytes
        beside, expected = (max(MeasuredStep(one).extra) for one in (stage.profile, own))
        assert beside == pytest.approx(expected, rel=0.05)


def test_policies_of_ranks_name_regions_of_their_own_stages(tmp_path):
    config, _, profile = measured()
    found = plan_pipeline(profile, schedule="1F1B", ranks=2, microbatches=4, budget=0.5, host=0)
    paths = found.save(tmp_path / "policies")
    assert [path.name for path in paths] == ["rank0.toml", "rank1.toml"]
    for path, own in zip(paths, found.ranks):
        policy = ps.Policy.load(path)
        assert policy.rules == own.plan.policy.rules
        if policy.rules:
            ps.Keeper(policy, backend="torch").attach(Decoder(config, part=own.layers))
    assert any(own.plan.policy.rules for own in found.ranks)


def test_weights_that_are_given_are_those_of_all_layers():
    profile, weights = model(2)
    with pytest.raises(ValueError, match=r"parameters: head missing"):
        pipeline((profile, {name: 1 for name in weights if name != "head"}), budget=0.5)


# --- the command ---

TINY = ("--preset", "tiny", "--layers", "3", "--seq", "32", "--repeats", "1", "--device", "cpu")


def run(*words):
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command_writes_one_policy_a_rank(tmp_path):
    out = tmp_path / "policies"
    done = run(*TINY, "--pp", "2", "--schedule", "1f1b", "--budget", "0.6", "--host", "0", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "rank  layers" in done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert sorted(path.name for path in out.iterdir()) == ["rank0.toml", "rank1.toml"]
    assert any(ps.Policy.load(path).rules for path in out.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--pp", "0"), "--pp 0: expected at least 1"),
        (("--pp", "2", "--schedule", "2F2B"), "unknown schedule '2F2B'"),
        (("--pp", "2", "--skew", "1.5"), "--skew is for a plan of one rank"),
        (("--pp", "2", "--microbatches", "1000000000"), "expected at most"),
        (("--pp", "64"), "every stage needs one"),
        (("--microbatches", "4"), "--microbatches is for a pipeline"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, says):
    done = run(*TINY, "--budget", "0.5", *words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
