"""What may be scanned: state that is not differentiated, several carries, groups of layers, shared values."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from ragged_model import CAPACITY, NAMES, assert_close, layer, make, plain_scan, split, with_stash
from support.tiers import slow

from pagestash.jax import Rows, StashPolicy, stash_scan

COUNTS = [100, 0, 256, 31]
# At 1.0 of the worst case there is no branch; at 0.4 some layers are recomputed.
FACTORS = [0.4, *slow(1.0)]


def policy(factor=1.0, **changes):
    return StashPolicy(
        **{"names": NAMES, "page_rows": 32, "fill": float("nan"), "capacity_factor": factor, **changes}
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
def test_keys_and_counters_in_params_and_carry(factor):
    """Dropout from a key in the params and one in the carry, and a counter that only passes through."""

    def noisy(params, carry):
        x, key, step, untouched = carry
        key, use = jax.random.split(key)
        x = x * jax.random.bernoulli(use, 0.9, x.shape) * jax.random.bernoulli(params["key"], 0.9, x.shape)
        x, aux = layer(params, x)
        return (x, key, step + 1, untouched), aux

    params, x = make(COUNTS)
    params["key"] = jax.random.split(jax.random.key(5), len(COUNTS))
    untouched = (jax.random.key(9), jnp.arange(3))
    floats, fixed = split(params)

    def loss(scan):
        def value(floats, x):
            (y, key, step, _), ys, _ = scan(
                noisy, (x, jax.random.key(1), jnp.int32(7), untouched), {**floats, **fixed}
            )
            return jnp.sum(y * y) + jnp.sum(ys["norm"]), (jax.random.key_data(key), step)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(floats, x)

    got, wanted = loss(with_stash(policy(factor))), loss(plain_scan)
    assert_close(got, wanted)
    assert int(got[0][1][1]) == 7 + len(COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
def test_several_carries_in_nested_trees(factor):
    def nested(params, carry):
        x, aux = layer(params["inner"][0], carry["stream"]["x"])
        total = carry["totals"][0] + jnp.sum(x * params["scale"])
        return {"stream": {"x": x}, "totals": (total, carry["totals"][1])}, {"deep": [aux, (total,)]}

    params, x = make(COUNTS)
    floats, fixed = split(params)

    def loss(scan):
        def value(floats, scale, x):
            stacked = {"inner": [{**floats, **fixed}], "scale": scale}
            carry = {"stream": {"x": x}, "totals": (jnp.float32(0), 0.5)}
            out, ys, _ = scan(nested, carry, stacked)
            return (
                out["totals"][0]
                + out["totals"][1] * jnp.sum(out["stream"]["x"] ** 2)
                + ys["deep"][1][0].sum()
            )

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(
            floats, jnp.linspace(0.5, 1.5, len(COUNTS)), x
        )

    assert_close(loss(with_stash(policy(factor))), loss(plain_scan))


def dense_layer(params, x):
    return x + jnp.tanh(x @ params["w"]), {"norm": jnp.mean(x * x)}


def narrow_layer(params, x):
    """Another mixture: half the rows, one tag, another width and dtype."""
    row = jnp.arange(x.shape[0] * 2)
    valid = (row < params["count"])[:, None]
    xs = jnp.where(valid, jnp.tile(x, (2, 1)), 0)
    out = checkpoint_name((xs @ params["w"]).astype(jnp.bfloat16), "h0")
    back = jnp.where(valid, jnp.sin(out.astype(x.dtype)), 0).reshape(2, *x.shape[:1], -1).sum(0)
    return x + back @ params["v"], {"rows": Rows.prefix(params["count"]), "norm": jnp.mean(x * x)}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0])
def test_dense_and_mixture_layers_in_turn_share_one_buffer(factor):
    params, x = make(COUNTS)
    mixture, fixed = split(params)
    draw = jax.random.normal(jax.random.key(3), (5, 32, 32)) * 0.1
    floats = {
        "dense": draw[:2],
        "mixture": mixture,
        "last": draw[2:3],
        "narrow": (draw[3:, :, :8], draw[3:, :8]),
    }
    counts = jnp.asarray([77, 128], jnp.int32)
    functions = [dense_layer, layer, narrow_layer, dense_layer]

    def stacks(floats):
        narrow = {"w": floats["narrow"][0], "v": floats["narrow"][1], "count": counts}
        return [{"w": floats["dense"]}, {**floats["mixture"], **fixed}, narrow, {"w": floats["last"]}]

    def plain(functions, x, stacks):
        ys = []
        for function, stack in zip(functions, stacks):
            x, y, _ = plain_scan(function, x, stack)
            ys.append(y)
        return x, ys, None

    def loss(scan):
        def value(floats, x):
            y, ys, report = scan(functions, x, stacks(floats))
            return jnp.sum(y * y) + sum(jnp.sum(group["norm"]) for group in ys), report

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(floats, x)

    got, wanted = loss(with_stash(policy(factor))), loss(plain)
    assert_close((got[0][0], got[1]), (wanted[0][0], wanted[1]))
    assert int(got[0][1].rows_wanted) == sum(COUNTS) + 77 + 128
    if factor == 1.0:
        assert int(got[0][1].rows_capacity) == len(COUNTS) * CAPACITY + 2 * 128


@pytest.mark.parametrize("factor", FACTORS)
def test_shared_values_get_the_sum_of_all_layers_gradients(factor):
    def scaled(params, x, shared):
        x, aux = layer(params, x * shared["scale"][shared["which"]])
        return x + shared["bias"], aux

    params, x = make(COUNTS)
    floats, fixed = split(params)
    shared = {"scale": jnp.asarray([0.5, 0.9]), "bias": jnp.linspace(-1, 1, 32)}

    def stash(floats, shared, x):
        more = {**shared, "which": jnp.int32(1)}
        return stash_scan(scaled, x, {**floats, **fixed}, shared=more, policy=policy(factor))

    def plain(floats, shared, x):
        more = {**shared, "which": jnp.int32(1)}
        return plain_scan(lambda p, c: scaled(p, c, more), x, {**floats, **fixed})

    def loss(scan):
        def value(*args):
            y, ys, _ = scan(*args)
            return jnp.sum(y * y) + jnp.sum(ys["norm"])

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(floats, shared, x)

    assert_close(loss(stash), loss(plain))


@pytest.mark.slow
def test_integers_of_the_surrounding_trace_may_be_closed_over():
    """Positions and segment ids usually are; they have no gradient to lose, whatever jit and grad wrap."""
    params, x = make(COUNTS)
    floats, fixed = split(params)

    def value(scan, floats, x, offset):
        def shifted(params, x):
            x, aux = layer(params, jnp.roll(x, offset, axis=0))
            return x, aux

        return jnp.sum(scan(shifted, x, {**floats, **fixed})[0] ** 2)

    stash, offset = with_stash(policy(0.5)), jnp.int32(3)
    wanted = jax.jit(jax.grad(lambda f, x, o: value(plain_scan, f, x, o)))(floats, x, offset)
    assert_close(jax.jit(jax.grad(lambda f, x, o: value(stash, f, x, o)))(floats, x, offset), wanted)
    assert_close(jax.grad(jax.jit(lambda f, x, o: value(stash, f, x, o)))(floats, x, offset), wanted)


@pytest.mark.parametrize("factor", FACTORS)
def test_microbatches_accumulate_around_it(factor):
    params, x = make(COUNTS)
    floats, fixed = split(params)
    batches = jnp.stack([x, x * 0.5, -x])

    def loss(scan):
        def one(floats, x):
            return jnp.sum(scan(layer, x, {**floats, **fixed})[0] ** 2)

        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(one)(floats, x)), None

        return jax.jit(lambda batches: lax.scan(add, jax.tree.map(jnp.zeros_like, floats), batches)[0])(
            batches
        )

    assert_close(loss(with_stash(policy(factor))), loss(plain_scan))


@pytest.mark.slow
def test_donated_parameters_are_updated():
    params, x = make(COUNTS)
    floats, fixed = split(params)

    def step(scan):
        def update(floats, x):
            grads = jax.grad(lambda f: jnp.sum(scan(layer, x, {**f, **fixed})[0] ** 2))(floats)
            return jax.tree.map(lambda p, g: p - 1e-6 * g, floats, grads)

        return jax.jit(update, donate_argnums=0)

    wanted = step(plain_scan)(jax.tree.map(jnp.copy, floats), x)
    given = jax.tree.map(jnp.copy, floats)
    assert_close(step(with_stash(policy()))(given, x), wanted)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.slow
def test_kept_tags_are_saved_whole_beside_the_stash():
    def tagged(params, x):
        return layer(params, checkpoint_name(jnp.tanh(x), "normed"))

    params, x = make(COUNTS)
    floats, fixed = split(params)

    def loss(scan):
        return jax.jit(jax.grad(lambda f, x: jnp.sum(scan(tagged, x, {**f, **fixed})[0] ** 2)))(floats, x)

    wanted = loss(lambda f, x, p: plain_scan(f, x, p, (*NAMES, "normed")))
    assert_close(loss(with_stash(policy(0.5, keep=("normed",)))), wanted)


@pytest.mark.parametrize("flag", [0, 1, 2])
def test_branches_that_save_different_things_in_one_place(flag):
    """jax gives what branches save one slot by shape: a stashed tag here, a kept tag or an input there."""

    def branching(params, x):
        valid = (jnp.arange(8) < params["count"])[:, None]

        def stashed(x):
            h = checkpoint_name(x @ params["w"], "h")
            return jnp.where(valid, h * h, 0)

        def kept(x):
            whole = checkpoint_name(x @ params["w"], "whole")
            return whole * whole

        def given(x):
            return x * x

        return x + lax.switch(params["flag"], [stashed, kept, given], x), Rows.prefix(params["count"])

    w, x = jnp.arange(18.0).reshape(2, 3, 3) / 16, jnp.arange(24.0).reshape(8, 3) / 16
    fixed = {"count": jnp.asarray([3, 2]), "flag": jnp.asarray([flag, flag])}

    def grad(scan):
        return jax.jit(
            jax.grad(lambda w, x: jnp.sum(scan(branching, x, {"w": w, **fixed})[0]), argnums=(0, 1))
        )

    wanted = grad(lambda f, x, p: plain_scan(f, x, p, ("h", "whole")))(w, x)
    assert_close(grad(with_stash(policy(names=("h",), keep=("whole",), page_rows=1)))(w, x), wanted)


@pytest.mark.slow
def test_a_tensor_saved_under_two_names_and_used_twice():
    def twice(params, x):
        x, aux = layer(params, x, tag=lambda v, name: checkpoint_name(v, "first") if name == "h0" else v)
        return x, aux

    params, x = make(COUNTS)
    floats, fixed = split(params)

    def loss(scan):
        return jax.jit(jax.grad(lambda f, x: jnp.sum(scan(twice, x, {**f, **fixed})[0] ** 2)))(floats, x)

    names = (*NAMES, "first")
    wanted = loss(lambda f, x, p: plain_scan(f, x, p, names))
    assert_close(loss(with_stash(policy(0.5, names=names))), wanted)


@pytest.mark.slow
def test_it_runs_without_jit():
    params, x = make([100, 31])
    floats, fixed = split(params)

    def grad(scan):
        return jax.grad(lambda f: jnp.sum(scan(layer, x, {**f, **fixed})[0] ** 2))

    assert_close(grad(with_stash(policy(0.5)))(floats), jax.jit(grad(plain_scan))(floats))
