"""A step on two lanes: the host launches segments, and the device runs them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plans import MB, made_up

import pagestash as ps
from pagestash.planning import predict
from pagestash.planning.lanes import Lanes
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


def launched(part, overhead=None):
    """A step whose host takes this part of the device's time."""
    profile = made_up(3, (8 * MB, 2), (5 * MB, 6))
    segments = [replace(segment, host_seconds=part * segment.seconds) for segment in profile.segments]
    return replace(profile, segments=segments, overhead=overhead)


RECOMPUTE = ps.Policy([ps.Rule("layers.*.a", "recompute")])
COSTLY = Overhead(record=1e-3, replay=1e-3)


@pytest.mark.parametrize("part", [0.1, 0.6, 1.5])
def test_without_a_policy_a_host_that_is_slow_at_times_costs_nothing(part):
    found = predict(launched(part), ps.Policy())
    assert found.slow_host_seconds == 0.0
    assert found.seconds == pytest.approx(launched(part).plain_seconds)


def test_a_slow_host_is_not_noticed_where_it_is_far_ahead_of_the_device():
    assert predict(launched(0.05, COSTLY.scaled(0.01)), RECOMPUTE).slow_host_seconds == 0.0


def test_where_the_host_bounds_the_step_half_of_a_policys_work_for_it_is_added():
    quick = predict(launched(2.0, COSTLY), RECOMPUTE)
    free = predict(launched(2.0), RECOMPUTE)
    work = quick.seconds - quick.slow_host_seconds - (free.seconds - free.slow_host_seconds)
    assert work > 5e-3
    assert quick.slow_host_seconds - free.slow_host_seconds == pytest.approx(work / 2)


def test_of_policies_that_are_as_fast_on_a_quick_host_the_one_with_less_work_for_it_is_predicted_to_be_faster():
    """Its lead over the device is enough on a quick host, and is used up on a slow one."""
    little, much = (predict(launched(0.45, COSTLY.scaled(factor)), RECOMPUTE) for factor in (0.01, 1.5))
    quick = [found.seconds - found.slow_host_seconds for found in (little, much)]
    assert quick[0] == pytest.approx(quick[1], rel=0.006)
    assert little.seconds < 0.98 * much.seconds
