"""Plans for steps whose rows vary: their pool is as large as the rows' distribution asks for."""

import importlib
import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from support import same
from torch import nn
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.pipeline import plans
from pagestash.planning import RowDistribution, overflow_probability, plan_profile, pool_for, predict
from pagestash.planning.budget import base_bytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable
from pagestash.planning.rank import RankPredictor, RankStep
from pagestash.planning.row_tensors import find_row_tensors
from pagestash.planning.skew import PoolSize, Skew
from pagestash.planning.unrolled import StageStep

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 128, 64, 4, 2, 512, 4
ROWS, ROW_BYTES = TOKENS * TOP_K, (WIDTH + 2 * INNER) * 4
CAPACITY = 4 * ROWS
PAGE = 65536
STASH = ps.Rule("layers.*.experts", "stash", min_bytes=PAGE)  # and no indices


class Loopback:
    """A dispatch of one rank, whose buffers have room for four times the rows that arrive."""

    experts, capacity = EXPERTS, CAPACITY

    def __init__(self, expected) -> None:
        self.expected = expected

    def send(self, x, ids, weights, over):
        return Received(x, weights, ids, route(ids, EXPERTS, capacity=CAPACITY, over=over), self.expected)

    def collect(self, slots, received):
        return slots


class Stack(nn.Module):
    def __init__(self, expected=0) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        self.layers = nn.ModuleList(MoE(config, dispatch=Loopback(expected)) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


@cache
def batch():
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def measured(expected=0):
    return ps.profile(Stack(expected), batch(), loss=lambda out: out, repeats=1)


def skewed(profile, rows, overflow=1e-3, rule=STASH):
    """What is predicted where all layers stash."""
    step = MeasuredStep(profile)
    step.skew = Skew.of(rows, step.rows, overflow)
    return Predictor(step).predict(RuleTable.of(ps.Policy([rule]), profile.regions))


# --- what a profile knows about rows ---


@pytest.mark.parametrize("expected", [0, 800, 1300])
def test_a_profile_knows_the_rows_that_its_layers_received(expected):
    found = find_row_tensors(measured(expected))
    wide = [tensor for tensor in found.tensors.values() if tensor.row_bytes > 4]
    assert len(wide) == 2 * DEPTH
    assert {(t.row_bytes, t.capacity, t.expected_rows) for t in wide} == {
        (WIDTH * 4, CAPACITY - expected, expected)
    }
    assert found.received() == {f"layers.{n}": max(expected, ROWS) for n in range(DEPTH)}
    assert (found.exact, found.fused) == (expected <= ROWS, True)
    heads = [tensor for tensor in measured(expected).tensors if tensor.storage in found.heads]
    assert [tensor.shape[0] for tensor in heads] == ([expected] * 2 * DEPTH if expected else [])


def test_views_and_strides_are_no_rows():
    profile = measured()
    whole = next(t for t in profile.tensors if t.counted and t.valid_bytes == t.storage_bytes)
    for changed in (
        replace(whole, valid_bytes=whole.storage_bytes - 1),  # no whole rows
        replace(whole, bytes=whole.bytes // 2, valid_bytes=whole.bytes - 64),  # a view of a larger storage
        replace(whole, valid_bytes=0, kind="weight_cast"),
    ):
        assert not find_row_tensors(replace(profile, tensors=[changed])).tensors


# --- the pool ---


def test_an_even_load_needs_what_was_measured():
    even, pages = skewed(measured(), 1.0), predict(measured(), ps.Policy([STASH]))
    rows = DEPTH * ROWS * ROW_BYTES
    assert even.pool.bytes == rows + 2 * DEPTH * PAGE  # a page that is not full for each tensor
    assert (even.pool.overflow, even.pool.pairs) == (0.0, DEPTH)
    assert pages.pool.overflow is None
    assert even.peak_bytes - pages.peak_bytes == even.pool.bytes - pages.pool.bytes


@pytest.mark.parametrize("expected", [0, 800])
def test_more_skew_takes_a_larger_pool_up_to_the_capacity(expected):
    profile = measured(expected)
    sizes = [skewed(profile, rows).pool.bytes for rows in (1.0, 1.2, 1.5, 2.0, 4.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] <= DEPTH * ((CAPACITY - expected) * ROW_BYTES + 2 * PAGE)
    often, seldom = (skewed(profile, 1.5, overflow).pool.bytes for overflow in (0.1, 1e-6))
    assert often < sizes[2] < seldom


@pytest.mark.parametrize(("expected", "overflow"), [(0, 1e-2), (0, 1e-3), (800, 1e-2)])
def test_steps_overflow_the_pool_no_more_often_than_the_plan_says(expected, overflow):
    steps, rows = 100_000, RowDistribution.log_normal(1.5)
    pool = skewed(measured(expected), rows, overflow).pool
    assert pool.overflow <= overflow
    drawn = np.random.default_rng(0).choice(rows.values, p=rows.weights, size=(steps, DEPTH))
    beyond = np.clip(np.floor(drawn * ROWS), 0, CAPACITY) - expected
    # Received rows and first projection, in whole pages each.
    pages = sum(np.ceil(np.maximum(beyond, 0) * size / PAGE) for size in (WIDTH * 4, 2 * INNER * 4)).sum(
        axis=1
    )
    happened = np.mean(pages * PAGE > pool.bytes)
    assert happened <= overflow * (1 + 5 / math.sqrt(overflow * steps))
    # Nor is it far too large: without the pages that may not be full, and two more, it would not do.
    assert np.mean(pages * PAGE > pool.bytes - (2 * DEPTH + 2) * PAGE) > overflow


def test_rows_that_leave_need_pages_for_what_exceeds_them():
    def needed(*homes):
        rules = [
            ps.Rule(f"layers.*.{part}", home, min_bytes=4096)
            for part, home in zip(("moe_act", "expert_fc1"), homes)
        ]
        step = MeasuredStep(measured())
        step.skew = Skew.of(1.5, step.rows)
        return Predictor(step).predict(RuleTable.of(ps.Policy(rules), step.profile.regions)).pool.bytes

    stashed, left, both = needed("stash", "stash"), needed("offload", "offload"), needed("offload", "stash")
    assert left < both < stashed
    # Those beyond the average, and a page for each tensor.
    beyond = pool_for(
        RowDistribution.log_normal(1.5), DEPTH, ROW_BYTES, average_rows=ROWS, expected_rows=ROWS
    )
    assert beyond + 2 * DEPTH * PAGE <= left < beyond + (2 * DEPTH + 1) * PAGE


# --- plans ---


def test_a_plan_has_the_pool_of_its_prediction_and_says_how_often_it_is_too_small():
    plan = plan_profile(measured(), budget=0.75, host=0, rows=1.5)
    assert {rule.home for rule in plan.policy.rules} == {"stash"}
    assert plan.policy.pool.device == plan.predicted.pool.bytes > 0
    assert 0 < plan.overflow_probability <= 1e-3
    assert 0.5 * ROWS < plan.expected_rows < 1.2 * ROWS
    assert (
        f"probability {plan.overflow_probability:.1g}; best with expected_rows={plan.expected_rows}"
        in str(plan)
    )
    base = base_bytes(measured(), 0)
    assert predict(measured(), plan.policy, base_bytes=base).peak_bytes == plan.predicted.peak_bytes
    unskewed = plan_profile(measured(), budget=0.75, host=0)
    assert (unskewed.overflow_probability, unskewed.expected_rows) == (None, None)
    assert unskewed.policy.pool == ps.PoolConfig()
    assert "overflow" not in str(unskewed)


def test_rows_come_from_a_file_a_distribution_or_the_profile(tmp_path):
    file = tmp_path / "rank0.jsonl"
    file.write_text(json.dumps({"iter": 1, "block": "decoder", "layer": 0, "tpe": [[600, 400], [500, 524]]}))
    from_file = plan_profile(measured(), budget=0.75, host=0, rows=file)
    same_rows = plan_profile(measured(), budget=0.75, host=0, rows=RowDistribution.measured([1000, 1024]))
    assert (
        from_file.policy
        == same_rows.policy
        == plan_profile(measured(), budget=0.75, host=0, rows=str(file)).policy
    )
    from_profile = plan_profile(measured(), budget=0.75, host=0, rows="measured")
    assert from_profile.overflow_probability == 0.0  # all layers received the same
    assert (
        from_profile.policy.pool.device
        < plan_profile(measured(), budget=0.75, host=0, rows=1.2).policy.pool.device
    )
    with pytest.raises(ValueError, match="some layers received no more than their expected_rows"):
        plan_profile(measured(1300), budget=0.75, host=0, rows="measured")


def test_a_plan_says_what_it_does_not_know_about_rows():
    full = plan_profile(measured(CAPACITY), budget=0.75, host=0, rows=1.5)
    assert full.overflow_probability is None
    assert full.notes == ["rows: the plan puts no rows that vary into pages, so there is no pool to overflow"]
    unsure = plan_profile(measured(1300), budget=0.75, host=0, rows=1.2)
    assert any("the average is taken as 1300, the most it can be" in note for note in unsure.notes)
    rows = find_row_tensors(measured())
    other = Skew.of(RowDistribution.log_normal(1.2, average=3 * ROWS), rows)
    told = f"rows: the profile's layers received {ROWS} on average; the pool is for {3 * ROWS}"
    assert other.notes(PoolSize(PAGE, 0.0, DEPTH), rows) == [told]
    assert Skew.of(1.2, rows).notes(PoolSize(PAGE, 0.0, DEPTH), rows) == []


def test_training_under_a_skewed_plan_has_its_pool_and_the_same_bits():
    plan = plan_profile(measured(), budget=0.75, host=0, rows=1.5)
    model = Stack()

    def step(context):
        model.zero_grad()
        with context:
            loss = model(batch())
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step(torch.enable_grad())
    keeper = ps.Keeper(plan.policy, backend="torch").attach(model)
    for _ in range(2):
        assert same(step(keeper.step()), plain)
    assert keeper.pool.device_pages * keeper.pool.page_bytes == plan.policy.pool.device
    stats = keeper.stats()
    assert not stats.overflow
    assert stats.no_page.groups == 0


def test_expected_rows_stay_out_of_the_predicted_pool():
    profile = measured(800)
    found = predict(profile, ps.Policy([STASH], ps.PoolConfig(page=1024, headroom=1.0)))
    model = Stack(800)
    keeper = ps.Keeper(ps.Policy([STASH], ps.PoolConfig(page=1024, headroom=1.0)), backend="torch").attach(
        model
    )
    with keeper.step():
        model(batch()).backward()
    assert found.pool.bytes == keeper.pool.device_pages * 1024


def test_a_pipeline_rank_has_a_pool_for_all_microbatches_that_wait():
    rows, found = RowDistribution.log_normal(1.5), []
    for index, actions in enumerate(plans("1F1B", ranks=2, microbatches=5)):
        step = RankStep([StageStep(index=index, profile=measured())], actions)
        step.skew = Skew.of(rows, step.rows)
        rules = RuleTable.of(ps.Policy([STASH]), measured().regions)
        found.append(RankPredictor(step).predict(rules).pool)
    # Two microbatches wait on the first rank, one on the last; two of five do so four times, and one five times.
    assert [pool.pairs for pool in found] == [2 * DEPTH, DEPTH]
    for pool, times in zip(found, (4, 5)):
        told = overflow_probability(
            rows,
            pool.pairs,
            ROW_BYTES,
            pool.bytes - 2 * pool.pairs * PAGE,
            average_rows=ROWS,
            capacity=CAPACITY,
            chances=times,
        )
        assert pool.overflow == pytest.approx(told, rel=1e-6)
        assert told <= 1e-3


# --- the command line ---


def run(*words):
    return CliRunner().invoke(app, ["plan", *words])


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "profile.json"
    measured().save(path)
    return str(path)


def test_the_command_takes_a_skew_or_a_file(saved, tmp_path):
    out, file = tmp_path / "policy.toml", tmp_path / "tokens.jsonl"
    done = run("--profile", saved, "--budget", "0.75", "--host", "0", "--skew", "1.5", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "a step overflows it with probability 0.00" in done.output
    wanted = plan_profile(measured(), budget=0.75, host=0, rows=1.5).policy
    assert ps.Policy.load(out) == wanted
    file.write_text(json.dumps({"iter": 1, "block": "decoder", "layer": 0, "tpe": [[600, 400, 500, 548]]}))
    done = run(
        "--profile",
        saved,
        "--budget",
        "0.75",
        "--host",
        "0",
        "--rows",
        str(file),
        "--ep",
        "2",
        "--out",
        str(out),
    )
    assert done.exit_code == 0, done.output
    assert (
        ps.Policy.load(out)
        == plan_profile(measured(), budget=0.75, host=0, rows=RowDistribution.measured([1000, 1048])).policy
    )
    assert run("--profile", saved, "--budget", "0.75", "--host", "0", "--rows", "measured").exit_code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--skew", "0.5"), "max/mean=0.5: the most is never below the mean"),
        (("--skew", "1.5", "--overflow", "2"), "overflow=2: expected a probability between 0 and 1"),
        (("--skew", "1.5", "--rows", "measured"), "--rows and --skew both say how rows vary"),
        (("--skew", "1.5", "--ep", "2"), "--ep 2: it divides the experts of a --rows file"),
        (("--rows", "none.jsonl"), "none.jsonl: No such file"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, says, saved):
    done = run("--profile", saved, "--budget", "0.75", *words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_bad_rows_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(importlib.import_module("pagestash.planning.make"), "measured_step", None)
    with pytest.raises(ValueError, match=r"max/mean=0.5: the most"):
        ps.plan(Stack(), batch(), budget=0.5, rows=0.5)
