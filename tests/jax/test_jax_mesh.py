"""Four devices: the ring against one device, shards that disagree, both places for the shard_map."""

import os
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ragged_model import assert_all_nan, assert_close, plain_scan, summed
from support.tiers import slow

from pagestash.jax import StashPolicy, stash_scan
from pagestash.jax.moe import (
    STASHED,
    X_SORTED,
    ExpertWeights,
    RingConfig,
    init_experts,
    ring_moe,
    ring_moe_over,
)

CONFIG = RingConfig(width=32, expert_width=48, experts=16, top_k=4, shards=4)
TOKENS, LAYERS = 128, 5
EXPECTED = TOKENS * CONFIG.top_k // CONFIG.shards
NAMES = (*STASHED, X_SORTED)
# Matmuls of a layer, the router's and the experts', and the sum over a token's choices; one shard may get all rows.
TERMS = summed(
    layers=LAYERS,
    terms_a_layer=CONFIG.width + 2 * CONFIG.width + 2 * CONFIG.expert_width + CONFIG.top_k,
    rows=TOKENS * CONFIG.top_k,
)
SPECS = ExpertWeights(jax.P(), *(jax.P(None, "expert"),) * 3)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


def weights_for(routing):
    """`balanced`: random; `one hot`: every choice on shard 0; `disagree`: a hot shard in even layers."""
    weights = jax.vmap(lambda key: init_experts(key, CONFIG))(jax.random.split(jax.random.key(0), LAYERS))
    hot = {"balanced": [], "one hot": range(LAYERS), "disagree": range(0, LAYERS, 2)}[routing]
    router = np.array(weights.router_DE)
    for layer in hot:
        # The input's first feature is a constant 4, so its row of the router is a bias.
        router[layer, 0, :4] += 50.0
    return weights._replace(router_DE=jnp.asarray(router))


X = jax.random.normal(jax.random.key(1), (TOKENS, CONFIG.width)).at[:, 0].set(4.0)


def inside(weights, x):
    """The layer as one shard runs it; the first feature stays what it is, for the bias."""
    y, rows, balance = ring_moe(weights, x, CONFIG, "expert")
    return x + y.at[:, 0].set(0), {"rows": rows, "balance": balance}


def around(mesh):
    """The layer with a `shard_map` of its own, as MaxText's."""
    mixture = ring_moe_over(mesh, CONFIG)

    def layer(weights, x):
        y, rows, balance = mixture(weights, x[:, None])
        return x + y[:, 0].at[:, 0].set(0), {"rows": rows, "balance": balance}

    return layer


def loss(scan, layer, weights, x):
    y, ys, report = scan(layer, x, weights)
    return jnp.sum(y * y), jnp.sum(ys["balance"]), report


@cache  # compiled once for all tests that run it
def layer_maps(mesh, scan):
    def total(weights, x):
        square, balance, report = loss(scan, around(mesh), weights, x)
        return square + balance, report

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def scan_is_mapped(mesh, scan, check_vma):
    def total(weights, x):
        square, balance, report = loss(scan, inside, weights, x)
        return lax.psum(square, "expert") + lax.pmean(balance, "expert"), report

    mapped = jax.shard_map(
        total, mesh=mesh, in_specs=(SPECS, jax.P("expert")), out_specs=(jax.P(), jax.P()), check_vma=check_vma
    )
    return jax.jit(jax.value_and_grad(mapped, argnums=(0, 1), has_aux=True))


def policy(factor, on_overflow="recompute"):
    return StashPolicy(
        names=NAMES,
        expected_rows=EXPECTED,
        capacity_factor=factor,
        page_rows=32,
        on_overflow=on_overflow,
        fill=float("nan"),
    )


plain = partial(plain_scan, names=NAMES)


@cache
def stashing(policy, mesh=None):
    return lambda layer, x, params: stash_scan(layer, x, params, policy=policy, mesh=mesh)


def _without_report(step):
    (value, _), grads = step
    return value, grads


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.25, 0.5, 0.0])
def test_layers_that_map_themselves(mesh, factor):
    stashed, wanted = layer_maps(mesh, stashing(policy(factor), mesh)), layer_maps(mesh, plain)
    recomputed = {}
    for routing in ("balanced", "one hot", "disagree"):
        weights = weights_for(routing)
        (value, report), grads = stashed(weights, X)
        assert_close((value, grads), _without_report(wanted(weights, X)), TERMS)
        recomputed[routing] = int(report.layers_recomputed)
        assert int(report.rows_used) <= int(report.rows_capacity)
    if factor == 1.25:
        # One shard with all rows of a layer holds 4 × the expected: 6.25 × for five layers fits one, not two.
        assert recomputed == {"balanced": 0, "one hot": 4, "disagree": 2}
    elif factor == 0.0:
        assert set(recomputed.values()) == {LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("factor", [0.5, 1.25])
def test_scans_inside_a_shard_map(mesh, factor, check_vma):
    stashed, wanted = (scan_is_mapped(mesh, scan, check_vma) for scan in (stashing(policy(factor)), plain))
    for routing in ("balanced", "disagree"):
        weights = weights_for(routing)
        (value, report), grads = stashed(weights, X)
        assert_close((value, grads), _without_report(wanted(weights, X)), TERMS)
        assert bool(report.overflowed) == (factor == 0.5 or routing == "disagree")


@pytest.mark.slow
def test_poison_reaches_every_shard_when_one_overflows(mesh):
    poisoning = stashing(policy(1.25, "poison"), mesh)
    (value, report), grads = layer_maps(mesh, poisoning)(weights_for("disagree"), X)
    assert bool(report.overflowed)
    assert_all_nan((value, grads))


@pytest.mark.slow
def test_error_raises_from_a_mesh_and_no_device_is_left_waiting():
    """In a process of its own: jax keeps the failed execution and tells of it again when it exits."""
    program = """
import jax, test_jax_mesh as t
mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
stash = lambda f, x, p: t.stash_scan(f, x, p, policy=t.policy(1.25, "error"), mesh=mesh)
try:
    jax.block_until_ready(t.layer_maps(mesh, stash)(t.weights_for("one hot"), t.X))
except jax.errors.JaxRuntimeError as error:
    print("raised", "stash overflow: 2559 rows wanted and 800 in the buffer" in str(error), flush=True)
"""
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # with what pytest has added for this file
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=there,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "raised True", done.stderr[-2000:]


@cache
def on_one_device():
    whole = RingConfig(width=32, expert_width=48, experts=16, top_k=4, shards=1)

    def one_device(weights, x):
        y, rows, balance = ring_moe(weights, x, whole)
        return x + y.at[:, 0].set(0), {"rows": rows, "balance": balance}

    def total(weights, x):
        square, balance, _ = loss(plain, one_device, weights, x)
        return square + balance

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))


@pytest.mark.parametrize("routing", [*slow("balanced"), "disagree"])
def test_expert_sharding_gives_what_one_device_gives(mesh, routing):
    """All experts on one device, every assignment computed there: the same sums, in another order."""
    weights = weights_for(routing)
    got = layer_maps(mesh, stashing(policy(1.25), mesh))(weights, X)
    # Another algorithm, not only another program: its errors need not cancel.
    assert_close(_without_report(got), on_one_device()(weights, X), TERMS, worst_case=True)


def test_one_shard_alone_computes_its_part(mesh):
    """`axis=None` is shard 0 of the ring without the ring: what the benchmark runs on one device."""
    weights = jax.tree.map(lambda leaf: leaf[0], weights_for("balanced"))
    local = weights._replace(**{name: getattr(weights, name)[:4] for name in weights._fields[1:]})
    y, rows, _ = jax.jit(lambda w, x: ring_moe(w, x, CONFIG))(local, X)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(ExpertWeights(jax.P(), *(jax.P("expert"),) * 3), jax.P("expert")),
        out_specs=jax.P("expert"),
        check_vma=False,
    )
    def count(weights, x):
        return ring_moe(weights, x, CONFIG, "expert")[1].count[None]

    counts = jax.jit(count)(weights, X)
    assert int(rows.count) == int(counts[0])
    assert int(counts.sum()) == TOKENS * CONFIG.top_k
    assert y.shape == X.shape


@pytest.mark.slow
def test_two_mesh_axes_with_rows_over_both():
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = RingConfig(width=32, expert_width=48, experts=16, top_k=4, shards=2)
    split_by = ExpertWeights(jax.P(), *(jax.P("expert"),) * 3)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split_by, jax.P(("data", "expert"))),
        out_specs=(jax.P(("data", "expert")),) * 2,
        check_vma=False,
    )
    def mixture(weights, x):
        y, rows, _ = ring_moe(weights, x, config, "expert")
        return y, jax.tree.map(lambda value: value[None], rows)

    def layer(weights, x):
        y, rows = mixture(weights, x)
        return x + y, {"rows": rows}

    def step(scan):
        return jax.jit(jax.grad(lambda w, x: jnp.sum(scan(layer, x, w)[0] ** 2), argnums=(0, 1)))

    weights = weights_for("balanced")
    chosen = policy(0.8)
    got = step(lambda f, x, p: stash_scan(f, x, p, policy=chosen, mesh=mesh))(weights, X)
    assert_close(got, step(plain)(weights, X), TERMS)
