"""Sizes: rows, bytes and the table for DeepSeek-V3."""

import jax
import jax.numpy as jnp
import pytest
from ragged_model import CAPACITY, NAMES, layer, make

from pagestash.jax import StashPolicy, buffer_bytes, expected_rows, plan, stash_scan, worst_case_rows

DEEPSEEK = {"batch": 2, "ep": 4, "seq": 4096, "top_k": 8}


def test_deepseek_v3():
    assert expected_rows(**DEEPSEEK) == 65_536
    assert worst_case_rows(**DEEPSEEK, num_experts=256) == 262_144
    assert buffer_bytes(65_536, 7168, 60) / 2**30 == 52.5


def test_few_local_experts_bound_the_worst_case():
    """With two experts a shard, a token has at most two rows there, however many experts it chose."""
    assert worst_case_rows(batch=1, ep=8, seq=16, top_k=4, num_experts=16) == 8 * 16 * 2


def test_the_plan_prints_the_table(capsys):
    lines = plan().lines
    printed = capsys.readouterr().out
    assert [int(line.nbytes / 2**30) for line in lines] == [210, 105, 78, 52]
    for figure in ("262,144", "131,072", "98,304", "65,536", "210.00", "105.00", "78.75", "52.50"):
        assert figure in printed


def test_bytes_are_what_a_scan_allocates():
    from pagestash.jax.geometry import Tag, lay_out

    tags = [Tag("a", (256, 48), jnp.dtype("float32")), Tag("b", (256, 32), jnp.dtype("float32"))]
    made = lay_out([(tags, 7)], capacity_factor=1.3, expected_rows=99, page_rows=32, backend="cpu")
    wanted = buffer_bytes(99, 80, 7, capacity_factor=1.3, dtype_bytes=4)
    # Rounded up to whole units, of which one is at most a page of one row width.
    assert 0 <= made.nbytes - wanted < made.unit_words * 4


def test_the_report_gives_the_rows_of_the_buffer():
    params, x = make([3, 4, 5])
    chosen = StashPolicy(names=NAMES, capacity_factor=1.5, expected_rows=CAPACITY // 4)
    report = jax.jit(lambda x: stash_scan(layer, x, params, policy=chosen)[2])(x)
    assert int(report.rows_capacity) == 1.5 * 3 * CAPACITY // 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_rows(0, 4, 4096, 8),
        lambda: worst_case_rows(2, 4, 4096, 8, 255),
        lambda: buffer_bytes(65_536, 7168, 60, capacity_factor=-1),
    ],
)
def test_impossible_sizes_are_refused(call):
    with pytest.raises(ValueError, match=r"has to be|choose a divisor"):
        call()
