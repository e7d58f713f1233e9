"""Predicted against published steps: the time rows of benchmarks/simulate.py."""

import pytest

from benchmarks import simulated_time


@pytest.fixture(scope="module")
def rows():
    return simulated_time.rows()


def test_offload_costs_what_was_published_within_a_point(rows):
    own = [row for row in rows if row.group == "time, offload"]
    assert len(own) == 3
    for row in own:
        assert abs(row.predicted - row.published) <= 0.01
        assert row.predicted < 1


def test_every_recompute_of_moonlight_costs_time(rows):
    own = [row for row in rows if row.group == "time, Moonlight"]
    assert len(own) == 5
    assert all(row.predicted > 1 for row in own)
    assert sum(bool(row.holds) for row in own) == 4


def test_overlap_is_worth_what_was_published_within_a_tenth(rows):
    own = [row for row in rows if row.group == "time, overlap"]
    assert len(own) == 2
    assert all(abs(row.error) < 0.1 and row.predicted > 1 for row in own)


def test_a_row_that_misses_says_why(rows):
    missed = [row for row in rows if row.holds is False]
    assert all(row.cause for row in missed)
    assert len(missed) == 2


def test_one_row_of_each_gpu_is_fitted_and_the_others_are_checked(rows):
    own = [row for row in rows if row.group == "time, absolute"]
    fitted = [row for row in own if row.holds is None]
    assert len(fitted) == len(simulated_time.FITTED)
    assert all("fitted" in row.what for row in fitted)
    assert sum(bool(row.holds) for row in own) == 8


def test_an_efficiency_is_never_above_one():
    for name, what in simulated_time.FITTED.items():
        cluster = simulated_time.scaled(simulated_time.case(what).cluster, simulated_time.constant(name))
        assert max(cluster.matmul.efficiency, cluster.device.memory_efficiency) <= 1
