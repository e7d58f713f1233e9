"""Predicted against published and measured bytes: the rows of benchmarks/simulate.py."""

import pytest

from benchmarks import simulate, simulated_memory
from benchmarks.simulated import Row


@pytest.fixture(scope="module")
def rows():
    return simulated_memory.rows()


def test_rows_that_miss_say_why(rows):
    missed = [row for row in rows if row.holds is False]
    assert [row.group for row in missed] == ["offloaded", "allocated", "saved"]
    assert all(row.cause for row in missed)


def test_arithmetic_of_worst_case_buffers_is_exact(rows):
    own = [row for row in rows if row.group == "seed 1"]
    assert len(own) == 3
    assert all(row.predicted == row.published for row in own)


def test_every_measured_step_of_our_own_machine_is_compared(rows):
    alone, ranks = ([row for row in rows if row.group == group] for group in ("one GPU", "four ranks"))
    for policy in ("keep", "offload attention", "recompute layers", "offload everything"):
        assert sum(row.what.endswith(f": {policy}") for row in alone) == 2
    assert len(ranks) == 2 * 4 * 2
    stacks = [row for row in rows if row.group == "static buffers"]
    assert len(stacks) == 3
    assert all(row.holds for row in (*alone, *ranks, *stacks))


def test_what_a_home_saves_has_the_published_sign(rows):
    own = [row for row in rows if row.group == "saved"]
    assert len(own) == 9
    assert all(row.predicted > 0 for row in own)


def test_a_row_says_what_was_missed_and_by_how_much():
    row = Row("seed", "a peak", "GiB", 50.0, 40.0, bar=0.05, cause="graphs")
    assert (row.holds, row.error) == (False, pytest.approx(-0.2))
    assert simulate.line(row).startswith("MISSED")
    assert simulate.line(row).endswith("(graphs)")
    met = Row("seed", "a peak", "GiB", 50.0, 49.0, bar=0.05, cause="graphs")
    assert "graphs" not in simulate.line(met)
    assert met.to_json()["cause"] == ""
    assert Row("seed", "a peak", "GiB", 50.0, 1.0).holds is None


@pytest.mark.slow
def test_the_benchmark_claims_every_bar(rows, tmp_path):
    path = simulate.run(tmp_path)
    assert path.exists()
    found = simulated_memory.claims(rows)
    assert len(found) == len(simulated_memory.GROUPS)
    assert [claim.holds for claim in found].count(False) == 3
