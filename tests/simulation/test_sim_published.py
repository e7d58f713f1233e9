"""Predicted against published and measured bytes: the rows of benchmarks/simulate.py."""

import pytest

from benchmarks import simulate, simulated_memory
from benchmarks.simulated import Row


@pytest.fixture(scope="module")
def rows():
    return simulated_memory.rows()


def test_only_the_row_that_is_known_to_miss_misses_and_says_why(rows):
    missed = [row for row in rows if row.holds is False]
    assert [row.group for row in missed] == ["bridge, overlapped"]
    assert all(row.cause for row in missed)


@pytest.mark.parametrize(("group", "count"), [("seed 1", 4), ("seed 2", 1)])
def test_arithmetic_of_the_first_two_seeds_is_exact(rows, group, count):
    own = [row for row in rows if row.group == group]
    assert len(own) == count
    assert all(row.predicted == row.published for row in own)


def test_every_measured_step_of_our_own_machine_is_compared(rows):
    alone, ranks = ([row for row in rows if row.group == group] for group in ("one GPU", "four ranks"))
    for policy in ("keep", "offload attention", "recompute layers", "offload everything"):
        assert sum(row.what.endswith(f": {policy}") for row in alone) == 2
    assert len(ranks) == 2 * 4 * 2
    stacks = [row for row in rows if row.group == "static buffers"]
    assert len(stacks) == 3
    assert all(row.holds for row in (*alone, *ranks, *stacks))


def test_moonlights_policies_save_and_none_costs_memory(rows):
    none, *others = [row for row in rows if row.group == "moonlight"]
    assert all(row.predicted < none.predicted for row in others)
    assert simulated_memory.moonlight_order(rows) == 0


def test_a_wrong_order_is_counted():
    rows = [
        Row("moonlight", name, "GB", told, found) for name, told, found in (("a", 2.0, 1.0), ("b", 1.0, 2.0))
    ]
    assert simulated_memory.moonlight_order(rows) == 1
    tie = [Row("moonlight", "a", "GB", 2.0, 1.0), Row("moonlight", "b", "GB", 2.001, 0.5)]
    assert simulated_memory.moonlight_order(tie) == 0


def test_a_row_says_what_was_missed_and_by_how_much():
    row = Row("seed", "a peak", "GiB", 50.0, 40.0, bar=0.05, cause="graphs")
    assert (row.holds, row.error) == (False, pytest.approx(-0.2))
    assert simulate.line(row).startswith("MISSED")
    assert simulate.line(row).endswith("(graphs)")
    met = Row("seed", "a peak", "GiB", 50.0, 49.0, bar=0.05, cause="graphs")
    assert "graphs" not in simulate.line(met)
    assert met.to_json()["cause"] == ""
    assert Row("seed", "a peak", "GiB", 50.0, 1.0).holds is None


def test_the_benchmark_claims_every_bar(rows, tmp_path):
    path = simulate.run(tmp_path)
    assert path.exists()
    found = simulated_memory.claims(rows)
    assert len(found) == len(simulated_memory.GROUPS) + 1
    assert [claim.holds for claim in found].count(False) == 1
