"""A step on two lanes: the host launches segments, and the device runs them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers import slow
from test_plans import MB, made_up

import pagestash as ps
from pagestash.pipeline import plans
from pagestash.planning import plan_profile, predict, prediction
from pagestash.planning.lanes import SLOWER, SLOWER_LINK, Lanes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable
from pagestash.profiling.link import Link
from pagestash.profiling.overhead import Overhead

seconds = st.floats(0.0, 1.0)


def test_a_step_that_is_bound_by_the_device_takes_its_time_and_one_by_the_host_the_hosts():
    assert sum(Lanes([3.0, 3.0], [1.0, 1.0]).seconds()) == 6.0
    assert sum(Lanes([1.0, 1.0], [3.0, 3.0]).seconds()) == 6.0
    # The host is ahead when the long segment begins, and behind after it.
    assert Lanes([1.0, 5.0, 1.0], [2.0, 2.0, 4.0]).seconds() == [2.0, 5.0, 1.0]


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_a_step_takes_no_less_than_either_lane_and_no_more_than_both(lanes):
    device, host = map(list, zip(*lanes))
    whole = sum(Lanes(device, host).seconds())
    assert max(sum(device), sum(host)) - 1e-9 <= whole <= sum(device) + sum(host) + 1e-9


@pytest.mark.parametrize("plain", [0.5, 1.0, 2.0])
def test_lanes_take_what_the_unobserved_step_took(plain):
    profile = made_up(3, (8 * MB, 2), (5 * MB, 6))
    segments = [replace(segment, host_seconds=0.7 * segment.seconds) for segment in profile.segments]
    measured = plain * profile.plain_seconds
    lanes = Lanes.of(replace(profile, segments=segments, plain_seconds=measured))
    assert sum(lanes.seconds()) == pytest.approx(measured)


def test_the_hosts_time_of_a_keeper_counts_where_the_step_waits_for_the_host():
    profile = made_up(3, (8 * MB, 2), (5 * MB, 6))
    policy = ps.Policy([ps.Rule("layers.*.a", "recompute")])
    overhead = Overhead(record=1e-3, replay=1e-3)
    added = []
    for part in (0.01, 1.0):
        segments = [replace(segment, host_seconds=part * segment.seconds) for segment in profile.segments]
        free = replace(profile, segments=segments)
        costly = replace(free, overhead=overhead)
        added.append(predict(costly, policy).seconds - predict(free, policy).seconds)
    assert added[0] < added[1]
    assert added[1] > 3e-3


# --- a host that is slow at times ---

COSTLY = Overhead(pack=5e-5, unpack=5e-5, record=1e-3, replay=1e-3, put=3e-4, get=3e-4)
POLICIES = {
    "none": ps.Policy(),
    "recompute": ps.Policy([ps.Rule("layers.*.a", "recompute")]),
    "offload": ps.Policy([ps.Rule("layers.*.a", "offload", prefetch_bytes=0)]),
}


def launched(part, overhead=COSTLY, layers=8):
    """A step whose host takes this part of the device's time."""
    profile = made_up(layers, (8 * MB, 0.3), (5 * MB, 1), link=2e9)
    segments = [replace(segment, host_seconds=part * segment.seconds) for segment in profile.segments]
    return replace(profile, segments=segments, overhead=overhead)


def on_slow_host(step):
    found = MeasuredStep(replace(step.profile, overhead=step.overhead.scaled(SLOWER)))
    found.lanes = step.lanes.on_slow_host()
    found.profile = replace(step.profile, link=step.profile.link.at(SLOWER_LINK))
    return found


@pytest.mark.parametrize("part", [0.2, 0.45, 0.6, 0.9, 1.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_host_takes_what_a_step_does_in_which_it_takes_longer_for_everything(part, policy):
    step = MeasuredStep(launched(part))
    rules = RuleTable.of(POLICIES[policy], step.profile.regions)
    found, slow = Predictor(step).predict(rules), Predictor(on_slow_host(step)).predict(rules)
    assert found.slow_host_seconds == pytest.approx(slow.seconds)
    assert found.mean_seconds == pytest.approx((found.seconds + slow.seconds) / 2)
    assert found.starts[-1] < found.seconds


def test_a_step_without_a_policy_takes_on_a_quick_host_what_was_measured():
    profile = launched(0.9)
    assert predict(profile, ps.Policy()).seconds == pytest.approx(profile.plain_seconds)


def test_where_there_is_no_host_to_wait_for_it_is_never_slow():
    found = predict(made_up(3, (8 * MB, 2), (5 * MB, 6)), POLICIES["recompute"])
    assert found.slow_host_seconds == found.mean_seconds == found.seconds


@pytest.mark.parametrize("part", [0.5, *slow(0.3, 0.7)])
def test_more_memory_never_makes_a_plan_slower_on_average(part):
    profile = launched(part, layers=4)
    plans = [plan_profile(profile, budget=budget / 20, host="1GiB") for budget in range(6, 20, 2)]
    means = [plan.predicted.mean_seconds for plan in plans]
    assert means == sorted(means, reverse=True)


@pytest.mark.whole_search
@pytest.mark.parametrize(("budget", "close"), [(0.55, 1.0), *slow((0.7, 1.01), (0.5, 1.0))])
def test_a_plan_is_the_fastest_on_average_and_not_on_a_quick_host(monkeypatch, budget, close):
    """In one of three the search for the average misses the other's plan, by less than a hundredth."""
    profile = launched(0.45)
    plan = plan_profile(profile, budget=budget, host="1GiB")
    with monkeypatch.context() as quick_hosts:
        quick_hosts.setattr(prediction, "SLOW_STEPS", 0.0)
        quick = plan_profile(profile, budget=budget, host="1GiB")
    assert quick.predicted.seconds <= plan.predicted.seconds
    assert plan.predicted.mean_seconds < close * quick.predicted.mean_seconds
    assert plan.predicted.slow_host_seconds < 0.99 * quick.predicted.slow_host_seconds
    assert "if the host takes 1.5 times as long" in str(plan)


def test_a_link_is_slower_at_times_to_the_host_and_back_and_not_on_the_device():
    link = Link(out=4.0, back=6.0, copy=8.0, measured=True)
    assert link.at(0.5) == Link(out=2.0, back=3.0, copy=8.0, measured=True)


def test_copies_that_just_hide_wait_where_the_link_is_slower():
    profile = made_up(8, (8 * MB, 2), (5 * MB, 1), link=4e9)
    policy = ps.Policy([ps.Rule("layers.*.a", "offload")])
    hidden = next(rate for rate in (1e9 * 1.05**n for n in range(200)) if not waits(profile, policy, rate))
    found = predict(with_link(profile, hidden), policy)
    assert found.wait_seconds == 0
    assert found.slow_host_seconds > found.seconds
    quick = predict(with_link(profile, 2 * hidden), policy)
    assert quick.slow_host_seconds == quick.seconds


def waits(profile, policy, rate):
    return predict(with_link(profile, rate), policy).wait_seconds > 0


def with_link(profile, rate):
    return replace(profile, link=Link(out=rate, back=rate))


def test_ranks_of_a_pipeline_are_compared_by_what_quick_steps_take():
    profile = made_up(4, (8 * MB, 2), (5 * MB, 6), link=2e9)
    order = plans("1F1B", ranks=2, microbatches=4)
    plan = plan_profile(profile, budget=0.4, host="1GiB", schedule=order, stage=0)
    assert plan.predicted.moved_bytes > 0
    assert plan.predicted.slow_host_seconds == plan.predicted.seconds
