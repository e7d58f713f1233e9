"""Gradients bit for bit where nothing rounds: dtypes, and random layers under random policies and transformations.

The same generator ran for some thousands of cases when this was written; a few seeds of it stay.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_layers import (
    LAYERS,
    Case,
    Step,
    assert_exact,
    draw,
    layer_of,
    loss_of,
    plain,
    stashed,
    weights_of,
)
from jax import lax
from ragged_model import assert_all_nan
from support.tiers import slow

from pagestash.jax import StashPolicy

ROWS, WIDTH = 32, 4


def gradients(loss):
    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def of_two_microbatches(loss):
    def total(weights, x, shared, integers):
        add = lambda sum, x: (sum + loss(weights, x, shared, integers)[0], None)  # noqa: E731
        return lax.scan(add, jnp.float32(0), jnp.stack([x, -x]))[0]

    return jax.grad(total, argnums=(0, 1, 2))


def mapped(loss):
    def both(weights, x, shared, integers):
        return jax.vmap(gradients(loss), (None, 0, None, None))(weights, jnp.stack([x, -x]), shared, integers)

    return both


AROUND = {
    "jit of grad": lambda loss: jax.jit(gradients(loss)),
    "grad of jit": lambda loss: gradients(jax.jit(loss)),
    "checkpoint": lambda loss: jax.jit(gradients(jax.checkpoint(loss))),
    "microbatches": lambda loss: jax.jit(of_two_microbatches(loss)),
    "vmap": lambda loss: jax.jit(mapped(loss)),
}


@pytest.mark.parametrize(
    ("seed", "around"),
    [
        (11, "jit of grad"),
        *slow((12, "grad of jit"), (13, "checkpoint"), (14, "microbatches"), (15, "vmap")),
    ],
)
def test_random_layers(seed, around):
    case = draw(seed, on_overflow="recompute")
    ours, theirs = (AROUND[around](loss_of(scan, case)) for scan in (stashed, plain))
    for _ in range(6):
        given = (case.weights, case.x, case.shared, case.windows())
        assert_exact(_without_report(ours(*given)), _without_report(theirs(*given)))


def _without_report(result):
    if isinstance(result[0], dict):
        return result
    (value, (y, aux, _)), grads = result
    return value, y, aux, grads


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*slow(21), 22])
def test_random_layers_are_poisoned_or_exact(seed):
    case = draw(seed, on_overflow="poison", capacity_factor=0.5, expected_rows=None)
    ours, theirs = (jax.jit(gradients(loss_of(scan, case))) for scan in (stashed, plain))
    seen = set()
    for _ in range(8):
        given = (case.weights, case.x, case.shared, case.windows())
        (value, (y, _, report)), grads = ours(*given)
        (wanted, (wanted_y, _, _)), wanted_grads = theirs(*given)
        seen.add(bool(report.overflowed))
        if report.overflowed:
            assert_all_nan((value, y, grads))
        else:
            assert_exact((value, y, grads), (wanted, wanted_y, wanted_grads))
    assert seen == {True, False}


@pytest.mark.slow
def test_random_layers_on_shards_that_disagree():
    """Each shard its own windows, the scan inside a `shard_map`."""
    case = draw(31, on_overflow="recompute", capacity_factor=0.5, expected_rows=None)
    mesh = jax.make_mesh((4,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(scan):
        def total(weights, x, shared, integers):
            mine = {name: value[:, 0] if value.ndim == 2 else value for name, value in integers.items()}
            value, (y, _, report) = loss_of(scan, case)(weights, x, shared, mine)
            return lax.psum(value, "shard"), (y, () if report is None else report.layers_recomputed)

        split = {"start": jax.P(None, "shard"), "count": jax.P(None, "shard"), "flag": jax.P()}
        specs = (jax.P(), jax.P("shard"), jax.P(), split)
        return jax.jit(
            gradients(
                jax.shard_map(
                    total, mesh=mesh, in_specs=specs, out_specs=(jax.P(), (jax.P("shard"), jax.P()))
                )
            )
        )

    ours, theirs, recomputed = step(stashed), step(plain), set()
    x = jnp.concatenate([case.x, -case.x, case.x, jnp.zeros_like(case.x)])
    for _ in range(6):
        given = (case.weights, x, case.shared, case.windows(4))
        (value, (y, again)), grads = ours(*given)
        (wanted, (wanted_y, _)), wanted_grads = theirs(*given)
        assert_exact((value, y, grads), (wanted, wanted_y, wanted_grads))
        recomputed.add(int(again))
    assert len(recomputed) > 1


def fixed_case(steps, dtype=jnp.float32, **policy):
    numbers = np.random.default_rng(0)
    given = {"names": tuple(step.tag for step in steps), "page_rows": 8, "fill": float("nan"), **policy}
    return Case(
        rows=ROWS,
        layer=layer_of(steps, 1, ROWS),
        policy=StashPolicy(**given),
        weights=jax.tree.map(lambda w: w.astype(dtype), weights_of(numbers, steps, WIDTH)),
        x=jnp.asarray(numbers.integers(-3, 4, (ROWS, WIDTH)), dtype),
        shared=jnp.zeros((WIDTH,), dtype),
        counter="int32",
        choices=None,
    )


def windows(counts, starts=(0, 0, 0, 0)):
    return {
        "start": jnp.asarray(starts, jnp.int32),
        "count": jnp.asarray(counts, jnp.int32),
        "flag": jnp.zeros(LAYERS, bool),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("bfloat16", "float8_e4m3fn", "int8"), marks=pytest.mark.slow),
        ("float16", "bool", "float8_e5m2"),
        pytest.param(("bool",), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_tensors_of_several_dtypes_share_the_buffer(kinds):
    steps = [Step("matmul", WIDTH, WIDTH, f"{kind} t", kind) for kind in kinds]
    case = fixed_case(steps, capacity_factor=0.5)
    ours, theirs = (jax.jit(gradients(loss_of(scan, case))) for scan in (stashed, plain))
    given = (case.weights, case.x, case.shared, windows([20, 17, ROWS, 0], [7, 0, 0, 0]))
    got = ours(*given)
    assert_exact(_without_report(got), _without_report(theirs(*given)))
    assert int(got[0][1][2].layers_recomputed) == 1
    for layer in (0, 2):  # out of the buffer, and recomputed
        assert bool((got[1][0]["w0"][layer] != 0).any())


@pytest.mark.parametrize("dtype", [*slow(jnp.bfloat16, jnp.float16)])
def test_models_in_a_narrow_dtype(dtype):
    """The numbers are so small that they are whole in bfloat16, too: float32 gives the same ones."""
    steps = [Step("matmul", WIDTH, 2, "a"), Step("square", 2, 2, "b")]
    given = windows([3, 1, 2, 0], [ROWS - 3, 4, 9, 0])

    def step(scan, dtype):
        stored = [replace(each, stored=jnp.dtype(dtype).name) for each in steps]
        case = fixed_case(stored, dtype, capacity_factor=0.1)

        def loss(weights, x, shared):
            return jnp.sum(scan(case, {**weights, **given}, x, shared)[0])

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(case.weights, case.x, case.shared)

    got, wanted, wide = step(stashed, dtype), step(plain, dtype), step(plain, jnp.float32)
    assert_exact(got, wanted)
    assert_exact(jax.tree.map(lambda g: g.astype(jnp.float32), wanted), wide)
