"""Drawn rows."""

import pytest
from test_sim_replay import replay, routed, step

from pagestash.row_counts.distribution import RowDistribution
from pagestash.simulation.replay.routing import PERIOD, Routing, routing_of


@pytest.mark.parametrize("skew", [1.1, 1.5, 2.0])
def test_the_hottest_rank_has_the_stated_rows_on_average(skew):
    rows = RowDistribution.log_normal(skew, draws=32)
    drawn = Routing(rows, ranks=32, layers=[range(30), range(30, 60)])
    hottest = [drawn.hottest(layer, microbatch) for layer in range(60) for microbatch in range(PERIOD)]
    assert sum(hottest) / len(hottest) == pytest.approx(skew, rel=0.05)
    assert all(drawn.held(layer, 0) <= drawn.hottest(layer, 0) for layer in range(60))


def test_no_rows_are_lost():
    drawn = Routing(RowDistribution.log_normal(1.5, draws=2), ranks=2, layers=[[0]])
    for microbatch in range(PERIOD):
        hottest, held = drawn.hottest(0, microbatch), drawn.held(0, microbatch)
        assert 1 <= hottest <= 2
        assert held in (pytest.approx(hottest), pytest.approx(2 - hottest))


def test_the_same_seed_draws_the_same():
    rows = RowDistribution.log_normal(1.5, draws=8)
    one, same, other = (Routing(rows, ranks=8, layers=[range(4)], seed=seed) for seed in (1, 1, 2))
    values = [[own.hottest(layer, 3) for layer in range(4)] for own in (one, same, other)]
    assert values[0] == values[1] != values[2]


def test_skew_of_one_is_the_balanced_step():
    costs = step("1F1B", 2, 8, lambda _: [routed()] * 2)
    routing = routing_of(costs, RowDistribution.log_normal(1.0), ranks=8)
    assert routing.hottest(0, 0) == routing.held(0, 0) == 1
    assert replay(costs, routing).seconds == replay(costs).seconds


def test_more_skew_is_never_faster():
    costs = step("Interleaved1F1B", 2, 8, lambda _: [routed()] * 2)
    times = [
        replay(costs, routing_of(costs, RowDistribution.log_normal(skew, draws=8), ranks=8)).seconds
        for skew in (1.0, 1.1, 1.3, 1.6, 2.0)
    ]
    assert times == sorted(times)
    assert times[-1] > 1.2 * times[0]
