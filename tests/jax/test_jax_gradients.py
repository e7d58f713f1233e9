"""Gradients of `stash_scan` are the plain scan's up to the order of sums, whatever the rows and the capacity.

Which bits can be promised is in `test_jax_bytes` and `test_jax_exact`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.test_util import check_grads
from ragged_model import (
    CAPACITY,
    NAMES,
    assert_close,
    assert_identical,
    gradients,
    layer,
    make,
    plain_scan,
    plain_with,
    split,
    with_stash,
)
from support.tiers import slow

from pagestash.jax import Rows, StashPolicy, stash_scan
from pagestash.jax.geometry import Tag, lay_out
from pagestash.jax.pages import place

NAN = float("nan")
PAGE = 32
PLACES = lay_out(
    [([Tag("t", (CAPACITY, 4), jnp.dtype("float32"))], 1)],
    capacity_factor=1.0,
    expected_rows=None,
    page_rows=PAGE,
    backend="cpu",
)
EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CAPACITY - 1, CAPACITY]


def policy(**changes):
    return StashPolicy(**{"names": NAMES, "page_rows": PAGE, "fill": NAN, **changes})


@pytest.mark.parametrize("factor", [0.5, *slow(1.25, 0.1, 0.0)])
def test_edge_counts_at_every_capacity(factor):
    params, x = make(EDGES)
    got = gradients(with_stash(policy(capacity_factor=factor, expected_rows=CAPACITY // 4)), params, x)
    assert_close((got[0][0], got[1]), _plain(params, x))
    assert bool(got[0][1].overflowed) == (sum(EDGES) > int(got[0][1].rows_capacity))


@pytest.mark.parametrize("memory", ["device", *slow("pinned_host")])
def test_window_layout(memory):
    counts = [CAPACITY, 40, 1, PAGE, 70, PAGE - 1, 100]
    starts = [0, 100, CAPACITY - 1, CAPACITY - PAGE, CAPACITY - 70, CAPACITY - PAGE + 1, 13]
    params, x = make(counts, starts)
    for factor in (1.0, 0.4) if memory == "device" else (0.4,):
        got = gradients(with_stash(policy(capacity_factor=factor, memory=memory)), params, x)
        assert_close((got[0][0], got[1]), _plain(params, x))


@pytest.mark.slow
def test_every_page_size_that_divides():
    params, x = make([0, 100, CAPACITY, 37], [0, 77, 0, 219])
    wanted = _plain(params, x)
    for page in (1, CAPACITY):
        got = gradients(with_stash(policy(page_rows=page, capacity_factor=0.9)), params, x)
        assert_close((got[0][0], got[1]), wanted)


@pytest.mark.slow
def test_the_tolerance_sees_one_lost_row():
    """A layer that reports one row less than it uses loses that row's part in backward, and it shows."""

    def forgetful(params, x):
        x, aux = layer(params, x)
        one_less = Rows(params["start"], params["count"] - 1)
        return x, {**aux, "rows": one_less}

    params, x = make([100, CAPACITY, 31, 60])
    (_, _), grads = gradients(with_stash(policy()), params, x, forgetful)
    with pytest.raises(AssertionError, match=r"off by \S+e-0[123] of the largest"):
        assert_close(grads, _plain(params, x)[1])


@pytest.mark.slow
def test_gradients_agree_with_finite_differences():
    params, x = make([9, 32, 0], [3, 0, 0], tokens=8, width=4, inner=4)
    floats, integers = split(params)
    for factor in (1.0, 0.3):
        chosen = policy(page_rows=8, capacity_factor=factor)

        def loss(floats, x, chosen=chosen):
            y, ys, _ = stash_scan(layer, x, {**floats, **integers}, policy=chosen)
            return jnp.sum(jnp.sin(y)) + jnp.sum(ys["norm"])

        check_grads(loss, (floats, x), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_default_barriers_of_checkpoint_change_nothing():
    """`jax.checkpoint` as most people write it, with prevent_cse left on."""
    params, x = make([100, 0, 256, 31])

    def plain(layer, x, params):
        names = jax.checkpoint_policies.save_only_these_names(*NAMES)
        saved = jax.checkpoint(layer, policy=names)
        return *jax.lax.scan(lambda carry, p: saved(p, carry), x, params), None

    got = gradients(with_stash(policy()), params, x)
    wanted = gradients(plain, params, x)
    assert_close((got[0][0], got[1]), (wanted[0][0], wanted[1]))


def test_outputs_without_differentiation_are_the_plain_scans():
    params, x = make([100, 0, 256, 31])
    y, ys, report = jax.jit(lambda p, x: stash_scan(layer, x, p, policy=policy(capacity_factor=0.5)))(
        params, x
    )
    y_plain, ys_plain, _ = jax.jit(lambda p, x: plain_scan(layer, x, p))(params, x)
    assert_close((y, ys), (y_plain, ys_plain))
    assert int(report.rows_wanted) == 387


@pytest.mark.slow
def test_a_bare_pair_reports_rows():
    def paired(params, x):
        x, aux = layer(params, x)
        return x, (aux["rows"].start, aux["rows"].count)

    params, x = make([100, 0, 256, 31])
    floats, integers = split(params)

    def loss(scan):
        return jax.jit(jax.grad(lambda floats, x: jnp.sum(scan(paired, x, {**floats, **integers})[0] ** 2)))

    got = loss(with_stash(policy(capacity_factor=0.5)))(floats, x)
    assert_close(got, loss(plain_scan)(floats, x))


@pytest.mark.slow
def test_new_rematerialisation_where_jax_has_the_switch():
    params, x = make([100, 0, 256, 31])
    with _remat3():
        got = gradients(with_stash(policy(capacity_factor=0.5)), params, x)
        wanted = _plain(params, x)
    assert_close((got[0][0], got[1]), wanted)


class _remat3:
    def __enter__(self):
        self.before = getattr(jax.config, "jax_remat3", None)
        if self.before is None:
            pytest.skip("this jax has no jax_remat3 switch")
        jax.config.update("jax_remat3", True)

    def __exit__(self, *_):
        jax.config.update("jax_remat3", self.before)


@pytest.mark.slow
def test_rows_past_the_end_mean_the_rows_that_exist():
    params, x = make([CAPACITY + 1000, 50], [0, CAPACITY - 20])
    got = gradients(with_stash(policy()), params, x)
    assert_close((got[0][0], got[1]), _plain(params, x))
    assert int(got[0][1].rows_wanted) == CAPACITY + 20


@pytest.mark.parametrize(
    ("start", "count", "kind"),
    [
        (1, 2**31 - 1, "int32"),  # all there are, from row 1 on
        (-3, 2**31 - 1, "int32"),
        (200, 56, "uint8"),
        (100, 28, "int8"),
        (0, 2**32 - 1, "uint32"),
        (2**31 + 5, 1, "uint32"),
    ],
)
def test_a_window_does_not_wrap_in_its_own_dtype(start, count, kind):
    placed, _ = place(
        PLACES, PLACES.groups[0], jnp.int32(0), Rows(jnp.asarray(start, kind), jnp.asarray(count, kind))
    )
    assert (int(placed.start), int(placed.end)) == (
        min(max(start, 0), CAPACITY),
        min(start + count, CAPACITY),
    )


@pytest.mark.parametrize(
    "rows",
    [Rows(2, np.int64(5)), *slow(Rows(0, 8), Rows.prefix(8)), pytest.param((0, 8), marks=pytest.mark.slow)],
    ids=str,
)
def test_rows_may_be_python_integers(rows):
    start, count = (rows.start, rows.count) if isinstance(rows, Rows) else rows

    def constant(w, x, rows):
        valid = ((jnp.arange(8) >= start) & (jnp.arange(8) < start + count))[:, None]
        h = checkpoint_name(jnp.where(valid, x @ w, 0), "h")
        return x + jnp.where(valid, h * h, 0), rows

    w, x = jnp.arange(18.0).reshape(2, 3, 3) / 16, jnp.arange(24.0).reshape(8, 3) / 16

    def loss(rows):
        scan = with_stash(StashPolicy(names=("h",), fill=NAN))
        return jax.grad(lambda w: jnp.sum(scan(lambda w, x: constant(w, x, rows), x, w)[0]))(w)

    assert_identical(loss(rows), loss(Rows(jnp.int32(start), jnp.int32(count))))


def test_prefix_is_a_window_from_row_zero():
    rows = Rows.prefix(jnp.int32(7))
    assert (int(rows.start), int(rows.count)) == (0, 7)


def _plain(params, x, layer=layer, names=NAMES):
    (loss, _), grads = gradients(plain_with(names), params, x, layer)
    return loss, grads
