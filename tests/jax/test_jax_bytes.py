"""What the stash guarantees by itself: backward gets the bytes that forward gave, in every dtype and layout.

Everything else a gradient goes through is XLA's, which promises no bits between two programs. So these layers
compute nothing: they move bytes that the test chose, and what backward was handed comes out as a gradient.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support.tiers import slow

from pagestash.jax import Rows, StashPolicy, stash_scan

LAYERS, ROWS, SHARDS = 5, 24, 4
KINDS = {
    "f32": ((3,), jnp.float32),
    "bf16": ((2, 2), jnp.bfloat16),
    "f16": ((5,), jnp.float16),
    "f8": ((7,), jnp.float8_e4m3fn),
    "i32": ((1,), jnp.int32),
    "u8": ((), jnp.uint8),
    "mask": ((4,), jnp.bool_),
}
STARTS, COUNTS = [0, 3, 23, 0, 17], [24, 9, 1, 0, 7]
POLICY = StashPolicy(names=tuple(KINDS), page_rows=4, fill=float("nan"))


@jax.custom_vjp
def reveal(sink, value):
    """Zero; the gradient of `sink` is the value that backward was handed."""
    return jnp.zeros(())


def _reveal_backward(value, _):
    shown = value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(jnp.float32)
    return shown, jnp.zeros_like(value) if shown is value else np.zeros(value.shape, jax.dtypes.float0)


reveal.defvjp(lambda sink, value: (jnp.zeros(()), value), _reveal_backward)


def layer(params, x):
    total = x
    for name, given in params["given"].items():
        kind = KINDS[name][1]
        floats = jnp.issubdtype(kind, jnp.floating)
        value = lax.bitcast_convert_type(given, kind) if floats else given.astype(kind)
        total += reveal(params["sink"][name], checkpoint_name(jnp.flip(value, 0), name))
    return total, Rows(params["start"], params["count"])


def given_bytes(layers=LAYERS, rows=ROWS, kinds=KINDS):
    """Random bits as integers, which carry no gradient; among the floats are NaN, infinity, -0 and subnormals."""
    random, given = np.random.default_rng(0), {}
    for name in kinds:
        shape, kind = (layers, rows, *KINDS[name][0]), np.dtype(KINDS[name][1])
        if not jnp.issubdtype(kind, jnp.floating):
            given[name] = random.integers(0, 2 if kind.kind == "b" else 100, shape).astype(np.int32)
            continue
        bits = random.integers(0, 2 ** (8 * kind.itemsize), shape).astype(f"uint{8 * kind.itemsize}")
        odd = np.asarray([np.nan, -np.inf, -0.0, 1e-40], np.float32).astype(kind).view(bits.dtype)
        bits.reshape(layers, -1)[:, :4] = odd
        # A signalling NaN may be quieted by any operation that touches it; a quiet one stays as it is.
        bits[np.isnan(bits.view(kind).astype(np.float32))] = odd[0]
        given[name] = bits
    return given


def sinks(given):
    return {
        name: jnp.zeros(value.shape, kind if jnp.issubdtype(kind, jnp.floating) else jnp.float32)
        for name, value in given.items()
        for kind in [KINDS[name][1]]
    }


def assert_restored(shown, given, report):
    """Every layer's tensors lie whole in their window and are zero around it, or are recomputed whole."""
    recomputed = set()
    for name, restored in shown.items():
        kind = np.dtype(KINDS[name][1])
        floats = jnp.issubdtype(kind, jnp.floating)
        wanted = np.flip(given[name].view(kind) if floats else given[name].astype(np.float32), 1)
        for index, (start, count) in enumerate(zip(STARTS, COUNTS)):
            windowed = np.zeros_like(wanted[index])
            windowed[start : start + count] = wanted[index][start : start + count]
            got = np.asarray(restored[index]).tobytes()
            assert got in (windowed.tobytes(), wanted[index].tobytes()), (name, index)
            if got != windowed.tobytes():
                recomputed.add(index)
    # A layer whose window is everything looks the same either way.
    assert len(recomputed) <= int(report.layers_recomputed) <= len(recomputed) + 1


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize(
    "kinds",
    [("f32",), *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in (("mask",), tuple(KINDS)))],
    ids=["one dtype", "booleans", "all dtypes"],
)
def test_backward_gets_the_bytes_that_forward_gave(memory, kinds):
    given = given_bytes(kinds=kinds)
    for factor in (1.0, 0.3):
        policy = StashPolicy(
            names=kinds, page_rows=4, capacity_factor=factor, memory=memory, fill=float("nan")
        )

        def loss(sink, given, policy=policy):
            start, count = jnp.asarray(STARTS), jnp.asarray(COUNTS)
            params = {"given": given, "sink": sink, "start": start, "count": count}
            y, _, report = stash_scan(layer, jnp.float32(0), params, policy=policy)
            return y, report

        shown, report = jax.jit(jax.grad(loss, has_aux=True))(sinks(given), given)
        assert_restored(shown, given, report)
        assert bool(report.overflowed) == (factor < 1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["scan", *slow("layer", "scan, checked")])
def test_every_shard_gets_its_own_bytes(where):
    mesh = jax.make_mesh((SHARDS,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    given = given_bytes(rows=SHARDS * ROWS)
    starts = jnp.stack([jnp.roll(jnp.asarray(STARTS), i) for i in range(SHARDS)], 1)
    counts = jnp.stack([jnp.roll(jnp.asarray(COUNTS), i) for i in range(SHARDS)], 1)
    params = {"given": given, "sink": sinks(given), "start": starts, "count": counts}
    split = partial(jax.tree.map, lambda leaf: jax.P(None, "rows"))

    def shard(params, x):  # the integers of one shard are an array of one
        one = {**params, "start": params["start"].reshape(()), "count": params["count"].reshape(())}
        y, rows = layer(one, x.reshape(()))
        return y[None], jax.tree.map(lambda value: value[None], rows)

    def layer_maps(params, x):
        inside = jax.tree.map(lambda _: jax.P("rows"), params)
        return jax.shard_map(
            shard, mesh=mesh, in_specs=(inside, jax.P("rows")), out_specs=jax.P("rows"), check_vma=False
        )(params, x)

    def loss(sink, params):
        params = {**params, "sink": sink}
        x = jnp.zeros(SHARDS)
        if where == "layer":
            y, _, report = stash_scan(layer_maps, x, params, policy=POLICY, mesh=mesh)
            return jnp.sum(y), report

        def scan(params, x):
            y, _, report = stash_scan(shard, x, params, policy=POLICY)
            return lax.psum(jnp.sum(y), "rows"), report

        return jax.shard_map(
            scan,
            mesh=mesh,
            in_specs=(split(params), jax.P("rows")),
            out_specs=jax.P(),
            check_vma=where == "scan, checked",
        )(params, x)

    shown, report = jax.jit(jax.grad(loss, has_aux=True))(params["sink"], params)
    assert not bool(report.overflowed)
    for index in range(SHARDS):
        mine = slice(index * ROWS, (index + 1) * ROWS)
        turned = [(layer - index) % LAYERS for layer in range(LAYERS)]
        back = np.argsort(turned)
        local = {name: value[back][:, mine] for name, value in given.items()}
        assert_restored({name: value[back][:, mine] for name, value in shown.items()}, local, report)
