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
