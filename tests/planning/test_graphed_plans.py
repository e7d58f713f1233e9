"""Plans for a step that runs as a CUDA graph: the host launches nothing in it, and no copy is known to be over."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.tiers import slow
from test_lanes import COSTLY, POLICIES, launched
from test_plans import MB, made_up
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.models import Decoder, preset
from pagestash.pipeline import plans
from pagestash.planning import checked, make, plan_profile, predict
from pagestash.planning.budget import base_bytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.make import GRAPH_BYTES
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable
from pagestash.planning.ranks import Alone
from pagestash.profiling.measure import repeated_step
from pagestash.profiling.overhead import Overhead
from pagestash.saved.offload import transfers


def on_gpu(profile):
    return replace(profile, device="cuda:0", loop_seconds=profile.plain_seconds)


@pytest.mark.parametrize("part", [0.2, 0.9, 1.5])
def test_neither_launches_nor_the_cost_of_a_keeper_count_in_a_graph(part):
    policy = POLICIES["recompute"]
    profile, costless = on_gpu(launched(part)), on_gpu(launched(part, overhead=Overhead()))
    found = predict(profile, policy, graphed=True)
    assert found.seconds == predict(costless, policy, graphed=True).seconds == found.slow_host_seconds
    assert found.seconds < predict(profile, policy, waits=True).seconds


@pytest.mark.parametrize("slower", [1.0, 1.1])
def test_a_step_that_the_device_bounds_takes_in_a_graph_what_it_took(slower):
    profile = on_gpu(launched(0.5))
    profile = replace(profile, loop_seconds=slower * profile.plain_seconds)
    assert predict(profile, ps.Policy(), graphed=True).seconds == pytest.approx(
        profile.loop_seconds, rel=0.03
    )


@pytest.mark.parametrize("plain", [0.8, 1.0, 1.2])
def test_a_step_that_the_host_bounds_takes_in_a_graph_what_the_device_was_seen_to_take(plain):
    profile = on_gpu(launched(1.5))
    device = sum(segment.seconds for segment in profile.segments)
    profile = replace(profile, plain_seconds=plain * 1.5 * device)
    assert predict(profile, ps.Policy(), graphed=True).seconds == pytest.approx(device)


def test_the_nearer_the_host_is_to_the_device_the_less_the_unobserved_step_tells():
    """A host that is a little slower makes a little difference."""
    device = sum(segment.seconds for segment in launched(1.0).segments)
    found = []
    for part in range(60, 111):
        profile = replace(on_gpu(launched(part / 100)), loop_seconds=1.2 * device)
        found.append(predict(profile, ps.Policy(), graphed=True).seconds)
    assert (found[0], found[-1]) == pytest.approx((1.2 * device, device))
    assert all(0 <= before - after <= 0.01 * device for before, after in pairwise(found))


@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_cpu_a_graphed_step_runs_eagerly(policy):
    profile = launched(0.5)
    assert predict(profile, POLICIES[policy], graphed=True) == predict(profile, POLICIES[policy])


def test_what_leaves_is_free_in_a_graph_only_when_compute_has_waited_for_it():
    """In a step that waits the keeper sees that a copy is over, and lets go of its source at once."""
    profile = on_gpu(made_up(8, (8 * MB, 2), (5 * MB, 1), link=4e9))
    policy = ps.Policy([ps.Rule("layers.*.a", "offload")])
    eager, graphed = predict(profile, policy, waits=True), predict(profile, policy, graphed=True)
    assert graphed.memory["offload"] != eager.memory["offload"]
    assert all(more >= less for more, less in zip(graphed.memory["offload"], eager.memory["offload"]))
    assert graphed.moved_bytes == eager.moved_bytes


@pytest.mark.parametrize("budget", [0.75, 0.5])
def test_a_plan_for_a_graph_is_as_fast_there_as_one_for_an_eager_step(budget):
    profile = on_gpu(launched(0.6, overhead=COSTLY, layers=4))
    eager = plan_profile(profile, budget=budget, host="1GiB", waits=True)
    graphed = plan_profile(profile, budget=budget, host="1GiB", graphed=True)
    assert graphed.predicted.peak_bytes <= graphed.budget_bytes == eager.budget_bytes + GRAPH_BYTES
    there = predict(profile, eager.policy, graphed=True)
    assert there.peak_bytes <= eager.budget_bytes
    assert graphed.predicted.mean_seconds <= there.mean_seconds
    assert "as a CUDA graph" in str(graphed)


def test_more_memory_never_makes_a_plan_for_a_graph_slower():
    profile = on_gpu(launched(0.6, layers=4))
    plans = [plan_profile(profile, budget=b / 20, host="1GiB", graphed=True) for b in range(6, 20, 2)]
    means = [plan.predicted.mean_seconds for plan in plans]
    assert means == sorted(means, reverse=True)


def test_a_graphed_step_has_no_host_to_fit_its_time_to():
    step = MeasuredStep(on_gpu(launched(0.9)), graphed=True)
    assert not any(step.lanes.host)
    assert step.overhead == Overhead()


def test_a_group_that_nobody_asks_for_is_on_the_host_until_the_end_of_a_graph():
    profile = on_gpu(made_up(6, (8 * MB, 2), (5 * MB, 1), link=4e9))
    last, turn = len(profile.segments) - 1, len(profile.segments) // 2
    tensors = [
        replace(tensor, needed_at=last, freed_at=last, asked=(last, 0), done_at=turn + 2)
        if tensor.region.endswith("a")
        else tensor
        for tensor in profile.tensors
    ]
    profile = replace(profile, tensors=tensors)
    policy = ps.Policy([ps.Rule("layers.*.a", "offload", prefetch_bytes=100 * MB)])
    found = predict(profile, policy, graphed=True)
    assert found.host_bytes == found.moved_bytes > 0


@pytest.mark.parametrize("over", [0, 3 * MB])
def test_what_a_graph_takes_more_counts_in_the_check(monkeypatch, over):
    """The steps that check a plan run eagerly."""
    profile = on_gpu(made_up(8, (8 * MB, 2), (5 * MB, 1), link=4e9))
    step = MeasuredStep(profile, graphed=True)
    policy = ps.Policy([ps.Rule("layers.*.a", "offload", prefetch_bytes=10 * MB)])
    eager, graphed = (
        predict(profile, policy, **way).peak_bytes for way in ({"waits": True}, {"graphed": True})
    )

    def measure_under(*given, timed, **more):
        assert not timed
        return checked.Measured(eager + over)

    monkeypatch.setattr(make, "measure_under", measure_under)
    model = torch.nn.Linear(2, 2)
    with ExitStack() as around:
        measure = make._measure(step, SimpleNamespace(model=model, gradients=nullcontext), around, Alone())
        assert graphed > eager
        assert measure(policy).peak_bytes == graphed + over


def test_a_rank_of_a_pipeline_is_no_graph():
    order = plans("1F1B", ranks=2, microbatches=4)
    with pytest.raises(ValueError, match="graphed=True: a pipeline's rank"):
        plan_profile(launched(0.5), budget=0.5, schedule=order, stage=0, graphed=True)
    with pytest.raises(ValueError, match="graphed=True: a pipeline's rank"):  # before anything is measured
        ps.plan(torch.nn.Linear(2, 2), "no batch", budget=0.5, schedule=order, stage=0, graphed=True)


def test_the_command_line_plans_for_a_graph(tmp_path):
    file = tmp_path / "profile.json"
    measured = ["profile", "--preset", "tiny", "--layers", "2", "--seq", "32", "--repeats", "1"]
    run = CliRunner()
    assert run.invoke(app, [*measured, "--json", str(file)]).exit_code == 0
    base = ["plan", "--profile", str(file), "--budget", "0.8", "--graphed"]
    found = run.invoke(app, base)
    assert found.exit_code == 0, found.output
    for more, error in (
        (["--pp", "2"], "--graphed is for a plan of one rank"),
        (["--cluster", "h100:8"], "--cluster has its own memory"),
    ):
        refused = run.invoke(app, [*base, *more])
        assert refused.exit_code == 2
        assert error in refused.output
    refused = run.invoke(app, ["plan", "--cluster", "h100:8", "--graphed"])
    assert refused.exit_code == 2
    assert "--graphed is for a measured step" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, *slow(1 << 20)])
def test_a_keeper_that_knows_no_copy_to_be_over_has_the_peak_that_is_predicted_of_a_graph(
    monkeypatch, prefetch
):
    torch.manual_seed(0)
    model = Decoder(preset("tiny", layers=6))
    model.initialise(0)
    tokens = torch.randint(0, 256, (4, 257))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    policy = ps.Policy([ps.Rule("layers.*", "offload", min_bytes=1, prefetch_bytes=prefetch)])
    profile = ps.profile(model, batch, repeats=1)
    base = base_bytes(profile, 0)
    step = MeasuredStep(profile, base)
    step.sees_copies = False  # (the profile is of a CPU)
    graphed = Predictor(step).predict(RuleTable.of(policy, profile.regions)).peak_bytes
    own = repeated_step(model, batch)
    with own.gradients():
        eager = base + checked.measure_under(own, policy).peak_bytes
        monkeypatch.setattr(transfers, "is_done", lambda event: False)
        captured = base + checked.measure_under(own, policy).peak_bytes
    assert graphed == pytest.approx(captured, abs=1024)
    assert eager < 0.95 * captured
