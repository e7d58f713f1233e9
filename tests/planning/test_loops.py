"""Steps that follow each other: the host launches one while the device runs the one before."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_graphed_plans import on_gpu
from test_lanes import COSTLY, POLICIES, launched
from test_plans import MB, made_up
from typer.testing import CliRunner

import pagestash as ps
from pagestash.cli import app
from pagestash.pipeline import plans
from pagestash.planning import plan_profile, predict
from pagestash.planning.lanes import SLOWER, SLOWER_IN_LOOP, Lanes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.profiling.overhead import Overhead

seconds = st.floats(0.0, 1.0)


def whole(lanes, waited=0.0):
    """What the step takes, if compute waits so long."""
    return lanes.takes(lanes.seconds()) + lanes.takes_longer(waited)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(0, 5), seconds)
def test_a_step_of_a_loop_takes_what_the_last_of_many_takes(lanes, at, waited):
    """Also if the device waits in it, while the host goes on."""
    device, host = map(list, zip(*lanes))
    longer = [own + waited * (number == at % len(device)) for number, own in enumerate(device)]
    many = Lanes(12 * longer, 12 * host).seconds()
    found = whole(Lanes(device, host, ahead=True), waited)
    assert found == pytest.approx(sum(many[-len(device) :]), abs=1e-6)


def test_a_host_that_is_slow_in_forward_costs_nothing_if_it_makes_up_for_it():
    lanes = Lanes([1.0, 5.0], [3.0, 1.0])
    assert whole(lanes) == 8.0
    assert whole(replace(lanes, ahead=True)) == 6.0
    assert whole(replace(lanes, ahead=True), 0.5) == 6.5


@pytest.mark.parametrize("loop", [0.999, 1.001])
def test_a_loop_that_the_host_bounds_does_not_make_the_device_slower(loop):
    """Or replays and copies would have no time to hide in."""
    profile = on_gpu(launched(1.5))
    device, host = (
        sum(getattr(segment, name) for segment in profile.segments) for name in ("seconds", "host_seconds")
    )
    lanes = Lanes.of(replace(profile, loop_seconds=loop * host), loops=True)
    assert sum(lanes.device) == pytest.approx(device, rel=2e-3)
    assert whole(lanes) == pytest.approx(loop * host)


def test_a_wait_for_a_copy_hides_behind_a_slower_host():
    """Copies for which compute waits half as long again, and a host that takes three times as long."""
    profile = on_gpu(made_up(8, (8 * MB, 1), (5 * MB, 1), link=2e9))
    segments = [replace(segment, host_seconds=3 * segment.seconds) for segment in profile.segments]
    policy = ps.Policy([ps.Rule("layers.*.a", "offload", prefetch_bytes=0)])
    found = predict(replace(profile, segments=segments, loop_seconds=3 * profile.plain_seconds), policy)
    assert sum(wait for _, wait in found.waits) > 0.3 * sum(segment.seconds for segment in segments)
    assert found.wait_seconds == 0
    assert found.seconds == pytest.approx(found.launch_seconds)


@pytest.mark.parametrize("part", [0.3, 0.9, 1.5])
@pytest.mark.parametrize("loop", [0.8, 1.0, 1.2])
def test_without_a_policy_it_takes_what_the_loop_took(part, loop):
    profile = on_gpu(launched(part))
    profile = replace(profile, loop_seconds=loop * profile.plain_seconds)
    assert predict(profile, ps.Policy()).seconds == pytest.approx(profile.loop_seconds)
    assert predict(profile, ps.Policy(), waits=True).seconds == pytest.approx(profile.plain_seconds)


@pytest.mark.parametrize(("part", "costs"), [(0.3, False), (1.0, True)])
def test_what_a_keeper_costs_the_host_counts_only_if_the_host_takes_longer_than_the_device(part, costs):
    policy = POLICIES["recompute"]
    found, free = (predict(on_gpu(launched(part, overhead=cost)), policy) for cost in (COSTLY, Overhead()))
    assert (found.seconds > free.seconds + 8e-3) == costs
    assert costs or found.seconds == free.seconds


def test_a_slow_host_is_less_so_in_a_loop_where_it_makes_up_for_what_it_lost():
    step = MeasuredStep(on_gpu(launched(0.9)), loops=True)
    assert step.lanes.slower == SLOWER_IN_LOOP < SLOWER
    plan = plan_profile(step.profile, budget=0.5, host="1GiB")
    assert f"if the host takes {SLOWER_IN_LOOP:g} times as long" in str(plan)


def test_a_host_that_is_ahead_sees_no_copy_end():
    profile = on_gpu(made_up(8, (8 * MB, 2), (5 * MB, 1), link=4e9))
    policy = ps.Policy([ps.Rule("layers.*.a", "offload")])
    ahead, waits, graphed = (
        predict(profile, policy, **way).memory["offload"] for way in ({}, {"waits": True}, {"graphed": True})
    )
    assert ahead == graphed
    assert ahead != waits
    assert all(more >= less for more, less in zip(ahead, waits))


@pytest.mark.whole_search
@pytest.mark.parametrize("budget", [0.75, 0.5])
def test_a_plan_for_a_loop_is_as_fast_there_as_one_for_steps_that_wait(budget):
    """To two thousandths: a search is no proof."""
    profile = on_gpu(launched(0.65, layers=4))
    loop, waits = (plan_profile(profile, budget=budget, host="1GiB", waits=way) for way in (False, True))
    assert loop.policy != waits.policy
    assert loop.predicted.mean_seconds <= 1.002 * predict(profile, waits.policy).mean_seconds
    assert waits.predicted.mean_seconds <= 1.002 * predict(profile, loop.policy, waits=True).mean_seconds
    assert (loop.waits, waits.waits) == (False, True)
    line = "in a loop that waits for the device before each"
    assert line in str(waits)
    assert line not in str(loop)


def test_more_memory_never_makes_a_plan_for_a_loop_slower():
    profile = on_gpu(launched(0.8, layers=4))
    found = [plan_profile(profile, budget=b / 20, host="1GiB").predicted for b in range(6, 20, 2)]
    means = [each.mean_seconds for each in found]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_cpu_nothing_is_ahead(policy):
    profile = launched(0.5)
    assert predict(profile, POLICIES[policy]) == predict(profile, POLICIES[policy], waits=True)


def test_a_rank_of_a_pipeline_has_no_host_that_waits():
    profile = on_gpu(made_up(4, (8 * MB, 2), (5 * MB, 6), link=2e9))
    order = plans("1F1B", ranks=2, microbatches=4)
    found = [
        plan_profile(profile, budget=0.4, host="1GiB", schedule=order, stage=0, waits=waits)
        for waits in (False, True)
    ]
    assert found[0].predicted == found[1].predicted
    assert not found[1].waits


def test_the_command_line_and_a_keeper_plan_for_a_loop_that_waits(tmp_path):
    file = tmp_path / "profile.json"
    profile = replace(on_gpu(launched(0.6, layers=4)), loop_seconds=0.05)
    profile.save(file)
    assert ps.Profile.load(file) == profile
    run = CliRunner()
    base = ["plan", "--profile", str(file), "--budget", "0.5", "--host", "1GiB"]
    found = run.invoke(app, [*base, "--waits"])
    assert found.exit_code == 0, found.output
    assert "in a loop that waits" in found.output
    assert "in a loop that waits" not in run.invoke(app, base).output
    refused = run.invoke(app, ["plan", "--cluster", "h100:8", "--waits"])
    assert refused.exit_code == 2
    assert "--waits is for a measured step" in refused.output
    assert ps.Keeper(budget=0.5, waits=True)._target.waits


def test_a_step_that_waits_by_itself_is_planned_level_for_what_its_loop_takes(tmp_path):
    profile = replace(on_gpu(launched(0.8, layers=4)), loop_seconds=0.9)
    waiting = replace(profile, host_waits=True)
    waiting.save(tmp_path / "profile.json")
    assert ps.Profile.load(tmp_path / "profile.json") == waiting
    assert predict(waiting, ps.Policy()).seconds == pytest.approx(0.9)
    assert predict(profile, ps.Policy()).seconds == pytest.approx(0.9)
    assert predict(waiting, ps.Policy(), waits=True).seconds == pytest.approx(profile.plain_seconds)
    level = replace(profile, plain_seconds=0.9)
    for policy in POLICIES.values():
        assert predict(waiting, policy) == predict(level, policy, waits=True)
    found = plan_profile(waiting, budget=0.5, host="1GiB")
    assert found.policy == plan_profile(level, budget=0.5, host="1GiB", waits=True).policy
    assert not found.waits
    assert "makes the host wait for the device" in str(found)
    assert "in a loop that waits" not in str(found)
    for way in ({"waits": True}, {"graphed": True}):  # which wait anyway, or launch all at once
        assert "makes the host wait" not in str(plan_profile(waiting, budget=0.5, host="1GiB", **way))
    assert "makes the host wait" not in str(plan_profile(profile, budget=0.5, host="1GiB"))
