"""Predicted against published steps: the time rows of benchmarks/simulate.py."""

import pytest

from benchmarks import simulated_time
from benchmarks.published_times import EARLIER, FITTED, HELD_OUT, SEEN
from pagestash.simulation.cluster.cluster import SHIPPED, load_cluster


@pytest.fixture(scope="module")
def rows():
    return simulated_time.rows()


def of(rows, group):
    return [row for row in rows if row.group == group]


@pytest.mark.slow
def test_the_shipped_constants_are_those_of_the_rows_that_they_name(rows):
    fitted = of(rows, "time, fitted")
    assert [row.bar for row in fitted] == [None] * len(FITTED)
    assert all(abs(row.error) < 0.005 for row in fitted)


@pytest.mark.slow
def test_no_row_that_is_judged_is_one_that_a_constant_was_fitted_to(rows):
    judged = [item.what for item in (*EARLIER, *SEEN, *HELD_OUT)]
    assert not {item.what for item in FITTED.values()} & set(judged)
    assert len(judged) == len(set(judged)) == 38


@pytest.mark.slow
def test_eleven_steps_are_within_twelve_per_cent(rows):
    own = [*of(rows, "time, earlier"), *of(rows, "time, seen")]
    assert sum(bool(row.holds) for row in own) >= 11


@pytest.mark.slow
def test_a_row_that_misses_says_why(rows):
    assert [row.what for row in rows if row.holds is False and not row.cause] == []


@pytest.mark.slow
def test_a_bar_of_what_something_adds_is_below_the_effect(rows):
    own = [row for row in rows if row.unit == "%"]
    assert len(own) == 9
    assert all(row.bar < 1 and row.published > 0 for row in own)


def test_a_shipped_efficiency_is_never_above_one():
    for name in SHIPPED:
        cluster = load_cluster(name, 1)
        most = max(cluster.matmul.efficiency, cluster.device.memory_efficiency)
        assert cluster.calibration.kernels * most <= 1
