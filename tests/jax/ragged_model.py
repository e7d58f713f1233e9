"""A layer small enough to read, with every trait a mixture layer has, and its plain scan.

Legend: t tokens, D width, F inner width, N = 4·t rows of which `start … start + count - 1` are valid.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pagestash.jax import Rows, stash_scan

NAMES = ("xs", "h0", "h1", "out")
TOKENS, WIDTH, INNER, COPIES = 64, 32, 48, 4
CAPACITY = TOKENS * COPIES


def layer(params, x, *, tag=lambda value, name: value):
    """Every token four times; a gate a token decides how much of each valid row comes back."""
    start, count = params["start"], params["count"]
    row = jnp.arange(x.shape[0] * COPIES)
    valid = ((row >= start) & (row < start + count))[:, None]
    xs_ND = checkpoint_name(tag(jnp.where(valid, jnp.tile(x, (COPIES, 1)), 0), "xs"), "xs")
    h0_NF = checkpoint_name(tag(xs_ND @ params["w0"], "h0"), "h0")
    h1_NF = checkpoint_name(tag(xs_ND @ params["w1"], "h1"), "h1")
    out_ND = checkpoint_name(tag((jax.nn.silu(h0_NF) * h1_NF).astype(x.dtype) @ params["wo"], "out"), "out")
    gate_N1 = jnp.tile(jax.nn.sigmoid(x @ params["gate"]), (COPIES, 1))
    back_tD = jnp.where(valid, out_ND * gate_N1, 0).reshape(COPIES, *x.shape).sum(0)
    return x + back_tD, {"rows": Rows(start, count), "norm": jnp.mean(x * x)}


def make(counts, starts=None, dtype=jnp.float32, seed=0, tokens=TOKENS, width=WIDTH, inner=INNER):
    """Stacked params and an input, one layer for each count."""
    random = np.random.default_rng(seed)  # jax.random would compile a program for every new shape
    layers = len(counts)

    def draw(*shape):
        return jnp.asarray(random.standard_normal((layers, *shape)) * shape[0] ** -0.5, dtype)

    params = {
        "w0": draw(width, inner),
        "w1": draw(width, inner),
        "wo": draw(inner, width),
        "gate": draw(width, 1),
        "start": jnp.asarray(starts if starts is not None else [0] * layers, jnp.int32),
        "count": jnp.asarray(counts, jnp.int32),
    }
    return params, jnp.asarray(random.standard_normal((tokens, width)), dtype)


def plain_scan(layer, x, params, names=NAMES):
    saved = jax.checkpoint(
        layer, policy=jax.checkpoint_policies.save_only_these_names(*names), prevent_cse=False
    )
    y, ys = lax.scan(lambda carry, params_l: saved(params_l, carry), x, params)
    return y, ys, None


@functools.cache
def plain_with(names):
    return lambda layer, x, params: plain_scan(layer, x, params, names)


@functools.cache
def with_stash(policy):
    return lambda layer, x, params: stash_scan(layer, x, params, policy=policy)


def loss_of(scan, layer=layer):
    """A loss of the last carry and of an auxiliary output, so that both kinds of cotangent are there."""

    def loss(floats, integers, x):
        y, ys, report = scan(layer, x, {**floats, **integers})
        return jnp.sum(jnp.square(y.astype(jnp.float32))) + jnp.sum(ys["norm"].astype(jnp.float32)), report

    return loss


def split(params):
    integers = {name: leaf for name, leaf in params.items() if not jnp.issubdtype(leaf.dtype, jnp.inexact)}
    return {name: leaf for name, leaf in params.items() if name not in integers}, integers


@functools.cache
def compiled(scan, layer):
    """One jitted function for each pair, so that other counts of the same shapes compile nothing."""
    return jax.jit(jax.value_and_grad(loss_of(scan, layer), argnums=(0, 2), has_aux=True))


def gradients(scan, params, x, layer=layer):
    """((loss, report), (gradient of params, of x)), compiled."""
    floats, integers = split(params)
    return compiled(scan, layer)(floats, integers, x)


def assert_identical(got, wanted):
    """Bit for bit, leaf by leaf."""
    got, wanted = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(wanted)
    assert len(got) == len(wanted)
    for (path, a), (_, b) in zip(got, wanted):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        a, b = np.asarray(a), np.asarray(b)
        differing = f"{jax.tree_util.keystr(path)}: {np.sum(a != b)} of {a.size} elements differ"
        assert a.tobytes() == b.tobytes(), differing


def summed(layers, terms_a_layer, rows):
    """Terms of the longest chain of sums from an input to a gradient.

    Every layer adds up `terms_a_layer` of them forward and backward, and a weight's gradient adds up its rows.
    """
    return 2 * layers * terms_a_layer + rows


# The four matmuls of a layer and the sum over copies; seven layers are the most a test has.
TERMS = summed(layers=7, terms_a_layer=2 * WIDTH + 2 * INNER + COPIES, rows=CAPACITY)


def assert_close(got, wanted, terms=TERMS, *, worst_case=False):
    """Equal up to the order of sums, which XLA chooses anew for every program; integers are equal.

    Adding n float32 terms rounds n times, each by half an eps at most and up as often as down, so two orders differ
    by about sqrt(n)·eps; four times that is allowed, 2.4e-5 of the largest entry. n counts all terms of the chain.
    The largest entry is one layer's where weights are stacked, (layers, …, …), else the whole leaf's. A lost row is
    a hundred times as much (`test_the_tolerance_sees_one_lost_row`). The worst case, where no rounding cancels
    another, is n·eps.
    """
    allowed = terms if worst_case else 4 * terms**0.5
    got, wanted = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(wanted)
    assert len(got) == len(wanted)
    for (path, a), (_, b) in zip(got, wanted):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if not jnp.issubdtype(b.dtype, jnp.floating):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
            continue
        eps = float(jnp.finfo(b.dtype).eps)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        axes = tuple(range(1 if b.ndim > 2 else 0, b.ndim))
        size = np.abs(b).max(axis=axes, keepdims=True)
        off = np.abs(a - b)  # a NaN is not within any tolerance
        share = (
            f"{jax.tree_util.keystr(path)}: off by {np.max(off / np.maximum(size, 1e-30)):.1e} of the largest"
        )
        assert (off <= allowed * eps * size).all(), f"{share}, more than {allowed:.0f} eps"


def assert_all_nan(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        assert bool(jnp.isnan(leaf).all()), jax.tree_util.keystr(path)
