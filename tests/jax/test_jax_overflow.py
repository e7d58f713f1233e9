"""Every overflow policy at every capacity: exact, NaN or an exception; never finite and wrong."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from ragged_model import (
    CAPACITY,
    NAMES,
    assert_all_nan,
    assert_close,
    gradients,
    layer,
    make,
    plain_scan,
    split,
)
from ragged_model import with_stash as scan_with
from support.tiers import slow

from pagestash.jax import StashOverflow, StashPolicy, stash_scan

EXPECTED = CAPACITY // 4
BALANCED = [EXPECTED] * 6
SKEWED = [0, CAPACITY, 10, 20, 100, EXPECTED]
ONE_HOT = [CAPACITY, 0, 0, CAPACITY, 0, 0]
FACTORS = [0.5, *slow(1.25, 1.0, 0.0)]  # each is a program to compile


def policy(factor, on_overflow):
    return StashPolicy(
        names=NAMES,
        capacity_factor=factor,
        expected_rows=EXPECTED,
        page_rows=16,
        on_overflow=on_overflow,
        fill=float("nan"),
    )


def fits(counts, factor):
    return sum(counts) <= factor * EXPECTED * len(counts)


@pytest.fixture(scope="module")
def plain():
    """Plain gradients by routing, computed once."""
    wanted = {}
    for counts in (BALANCED, SKEWED, ONE_HOT):
        (loss, _), grads = gradients(plain_scan, *make(counts))
        wanted[tuple(counts)] = loss, grads
    return wanted


@pytest.mark.parametrize("factor", FACTORS)
def test_recompute_is_exact(factor, plain):
    for counts in (BALANCED, SKEWED, ONE_HOT):
        (loss, report), grads = gradients(scan_with(policy(factor, "recompute")), *make(counts))
        assert_close((loss, grads), plain[tuple(counts)])
        assert int(report.rows_wanted) == sum(counts)
        assert bool(report.overflowed) == (not fits(counts, factor))
        assert (int(report.layers_recomputed) > 0) == (not fits(counts, factor))
        assert int(report.rows_used) <= int(report.rows_capacity) == int(factor * EXPECTED * len(counts))


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
def test_poison_is_nan_everywhere_or_exact(factor, plain):
    for counts in (BALANCED, SKEWED, ONE_HOT):
        (loss, report), grads = gradients(scan_with(policy(factor, "poison")), *make(counts))
        assert int(report.layers_recomputed) == 0
        if fits(counts, factor):
            assert_close((loss, grads), plain[tuple(counts)])
        else:
            assert_all_nan((loss, grads))


@pytest.mark.parametrize("factor", FACTORS)
def test_error_raises_or_is_exact(factor, plain):
    for counts in (BALANCED, ONE_HOT):
        if fits(counts, factor):
            (loss, _), grads = gradients(scan_with(policy(factor, "error")), *make(counts))
            assert_close((loss, grads), plain[tuple(counts)])
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"stash overflow: .* raise capacity_factor"):
                jax.block_until_ready(gradients(scan_with(policy(factor, "error")), *make(counts)))


def test_the_report_can_be_checked_functionally():
    params, x = make(ONE_HOT)
    floats, fixed = split(params)

    def loss(floats):
        y, _, report = stash_scan(layer, x, {**floats, **fixed}, policy=policy(0.25, "poison"))
        checkify.check(jnp.logical_not(report.overflowed), "no room for {n} rows", n=report.rows_wanted)
        return jnp.sum(y**2)

    error, grads = jax.jit(checkify.checkify(jax.grad(loss)))(floats)
    assert "no room for 512 rows" in error.get()
    assert_all_nan(grads)


def test_overflow_is_no_error_without_differentiation():
    params, x = make(ONE_HOT)
    y, _, report = jax.jit(lambda x: stash_scan(layer, x, params, policy=policy(0.25, "error")))(x)
    assert bool(jnp.isfinite(y).all())
    assert bool(report.overflowed)


@pytest.mark.slow
def test_layers_without_rows_need_no_room():
    (loss, report), grads = gradients(scan_with(policy(0.0, "poison")), *make([0, 0, 0]))
    (wanted, _), plain_grads = gradients(plain_scan, *make([0, 0, 0]))
    assert_close((loss, grads), (wanted, plain_grads))
    assert not bool(report.overflowed)


def test_the_exception_has_a_name_of_its_own():
    assert issubclass(StashOverflow, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_routings_are_exact_at_random_capacities(seed):
    draw = jax.random.split(jax.random.key(seed), 3)
    starts = jax.random.randint(draw[0], (6,), 0, CAPACITY)
    counts = jax.random.randint(draw[1], (6,), 0, CAPACITY - starts + 1)
    factor = float(jax.random.uniform(draw[2], (), maxval=3.0))
    made = make(counts.tolist(), starts.tolist(), seed=seed)
    (loss, _), grads = gradients(scan_with(policy(factor, "recompute")), *made)
    (wanted, _), plain_grads = gradients(plain_scan, *made)
    assert_close((loss, grads), (wanted, plain_grads))
