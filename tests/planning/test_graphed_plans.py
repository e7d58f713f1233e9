"""Plans for a step that runs as a CUDA graph: the host launches nothing in it, and no copy is known to be over."""

from dataclasses import replace

import pytest
import torch
from test_lanes import COSTLY, POLICIES, launched
from test_plans import MB, made_up
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.pipeline import plans
from pagestash.planning import plan_profile, predict
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.profiling.overhead import Overhead


def without_host(profile):
    segments = [replace(segment, host_seconds=None) for segment in profile.segments]
    return replace(profile, segments=segments, overhead=Overhead())


@pytest.mark.parametrize("part", [0.2, 0.9, 1.5])
def test_neither_launches_nor_the_cost_of_a_keeper_count_in_a_graph(part):
    policy = POLICIES["recompute"]
    found = predict(launched(part), policy, graphed=True)
    free = predict(launched(part, overhead=Overhead()), policy, graphed=True)
    assert found.seconds == free.seconds == found.slow_host_seconds
    assert found.seconds < predict(launched(part), policy).seconds


def test_a_step_that_the_device_bounds_takes_in_a_graph_what_it_took():
    profile = without_host(launched(0.5))
    assert predict(profile, ps.Policy(), graphed=True).seconds == pytest.approx(profile.plain_seconds)


def test_what_leaves_is_free_in_a_graph_only_when_compute_has_waited_for_it():
    """Eagerly the keeper sees that a copy is over, and lets go of its source at once."""
    profile = made_up(8, (8 * MB, 2), (5 * MB, 1), link=4e9)
    eager, graphed = (
        predict(profile, ps.Policy([ps.Rule("layers.*.a", "offload")]), graphed=way) for way in (False, True)
    )
    assert graphed.memory["offload"] != eager.memory["offload"]
    assert all(more >= less for more, less in zip(graphed.memory["offload"], eager.memory["offload"]))
    assert graphed.moved_bytes == eager.moved_bytes


@pytest.mark.parametrize("budget", [0.75, 0.5])
def test_a_plan_for_a_graph_is_as_fast_there_as_one_for_an_eager_step(budget):
    profile = launched(0.6, overhead=COSTLY, layers=4)
    eager = plan_profile(profile, budget=budget, host="1GiB")
    graphed = plan_profile(profile, budget=budget, host="1GiB", graphed=True)
    assert graphed.predicted.peak_bytes <= graphed.budget_bytes == eager.budget_bytes
    there = predict(profile, eager.policy, graphed=True)
    if there.peak_bytes <= eager.budget_bytes:
        assert graphed.predicted.mean_seconds <= there.mean_seconds
    assert graphed.predicted.mean_seconds < eager.predicted.mean_seconds


def test_a_graphed_step_has_no_host_to_fit_its_time_to():
    step = MeasuredStep(launched(0.9), graphed=True)
    assert not any(step.lanes.host)
    assert step.overhead == Overhead()


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
        (["--ranks", "2"], "--graphed is for a plan of one rank"),
        (["--cluster", "h100:8"], "--cluster has its own memory"),
    ):
        refused = run.invoke(app, [*base, *more])
        assert refused.exit_code == 2
        assert error in refused.output
    refused = run.invoke(app, ["plan", "--cluster", "h100:8", "--graphed"])
    assert refused.exit_code == 2
    assert "--graphed is for a measured step" in refused.output
