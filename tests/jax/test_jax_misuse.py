"""What can go wrong in a user's hands, and what the error tells them to do."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from ragged_model import CAPACITY, NAMES, assert_close, layer, make, split

from pagestash.jax import Rows, StashPolicy, stash_scan


def scan(layer, params, x, **changes):
    return stash_scan(layer, x, params, policy=StashPolicy(**{"names": NAMES, **changes}))


def test_a_name_that_tags_nothing_lists_the_tags_there_are():
    params, x = make([3, 4])
    with pytest.raises(ValueError, match=r"names 'h00'.*'h0', 'h1', 'out', 'xs'.*Did you mean 'h0'\?"):
        scan(layer, params, x, names=("h00",))
    with pytest.raises(ValueError, match="no tags at all"):
        scan(lambda p, x: (x, None), params, x)


def test_a_tag_with_other_rows_is_named():
    def odd(params, x):
        x, aux = layer(params, x)
        return jnp.sin(checkpoint_name(x * 2, "tokens")), aux

    params, x = make([3, 4])
    with pytest.raises(ValueError, match=r"leading size of 'tokens' is not the row capacity 256.*keep"):
        scan(odd, params, x, names=(*NAMES, "tokens"))
    with pytest.raises(ValueError, match="is not the row capacity 128"):
        scan(layer, params, x, row_capacity=128)


def test_a_tag_without_rows_is_named():
    def scalar(params, x):
        x, aux = layer(params, x)
        return x * jnp.sin(checkpoint_name(jnp.sum(x), "total")), aux

    with pytest.raises(ValueError, match=r"tag 'total'.*has shape \(\): expected a leading axis of rows"):
        scan(scalar, *make([3, 4]), names=("total",))


def repeated(how):
    """A layer that tags inside of a loop over experts, or inside of a `vmap` over them."""

    def layer(w, x):
        valid = (jnp.arange(16) < 2)[:, None]

        def expert(w):
            return jnp.where(valid, jnp.sin(checkpoint_name(x @ w, "h")), 0)

        several = {
            "a loop": lambda: lax.scan(lambda total, w: (total + expert(w), None), jnp.zeros_like(x), w)[0],
            "a loop in jit": lambda: jax.jit(lambda: lax.map(expert, w).sum(0))(),
            "a vmap": lambda: jax.vmap(expert)(w).sum(0),
            "a vmap of jit": lambda: jax.vmap(jax.jit(expert))(w).sum(0),
            "a vmap in jit": lambda: jax.jit(jax.vmap(expert))(w).sum(0),
            "a vmap of checkpoint": lambda: jax.vmap(jax.checkpoint(expert))(w).sum(0),
        }
        return x + several[how](), Rows.prefix(2)

    return layer


@pytest.mark.parametrize(
    "how", ["a loop", "a loop in jit", "a vmap", "a vmap of jit", "a vmap in jit", "a vmap of checkpoint"]
)
def test_a_tag_inside_a_loop_or_a_vmap_is_refused(how):
    """Its leading axis would be the loop's, taken for rows; experts past the count came back as zeros."""
    w, x = jnp.ones((2, 4, 3, 3)), jnp.ones((16, 3))
    where = " ".join(how.split()[:2])
    with pytest.raises(ValueError, match=rf"tag 'h'.*is inside {where}:.*Tag the value outside of it.*keep"):
        scan(repeated(how), w, x, names=("h",))


@pytest.mark.slow
def test_a_kept_tag_may_stand_inside_a_loop():
    def both(params, x):
        x, aux = layer(params, x)
        looped = lax.map(lambda k: jnp.sin(checkpoint_name(k * x, "looped")), jnp.arange(2.0)).sum(0)
        return x + looped, aux

    params, x = make([3, 4])
    floats, integers = split(params)

    def grad(names, **policy):
        total = lambda f: jnp.sum(scan(both, {**f, **integers}, x, names=names, **policy)[0])  # noqa: E731
        return jax.jit(jax.grad(total))(floats)

    assert_close(grad(NAMES, keep=("looped",)), grad(NAMES))


@pytest.mark.parametrize(
    "kinds", [("h",), pytest.param(("h", "narrow"), marks=pytest.mark.slow)], ids=["one dtype", "two dtypes"]
)
def test_second_derivatives_are_refused(kinds):
    def two_kinds(w, x):
        h = checkpoint_name(x @ w, "h")
        narrow = checkpoint_name(jnp.sin(h).astype(jnp.bfloat16), "narrow")
        return x + h * narrow.astype(jnp.float32), Rows.prefix(8)

    w, x = jnp.ones((2, 3, 3)), jnp.ones((8, 3))
    loss = lambda w: jnp.sum(scan(two_kinds, w, x, names=kinds)[0])  # noqa: E731
    again = {
        "jvp of grad": lambda: jax.jvp(jax.grad(loss), (w,), (w,)),
        "grad of grad": lambda: jax.grad(lambda w: jnp.sum(jax.jit(jax.grad(loss))(w)))(w),
        "grad by a cotangent": lambda: jax.grad(lambda t: jnp.sum(jax.vjp(loss, w)[1](t)[0]))(1.0),
    }
    for differentiate in again.values():
        with pytest.raises(NotImplementedError, match=r"differentiated twice.*Use lax.scan"):
            differentiate()
    # What is of first order runs: a step of gradient descent differentiated by its rate.
    grad = jax.grad(loss)(w)
    assert float(jax.grad(lambda rate: jnp.sum(w - rate * jax.grad(loss)(w)))(0.1)) == -float(jnp.sum(grad))


def test_a_page_that_does_not_divide_offers_divisors():
    with pytest.raises(ValueError, match=rf"page_rows=100 does not divide.*{CAPACITY}.*64 or 128"):
        scan(layer, *make([3, 4]), page_rows=100)
    with pytest.raises(ValueError, match="page_rows=512 does not divide"):
        scan(layer, *make([3, 4]), page_rows=512)


@pytest.mark.parametrize("order", ["jit of grad", "grad of jit", "grad"])
def test_closing_over_a_differentiated_value_is_an_error(order):
    params, x = make([3, 4])
    floats, integers = split(params)

    def loss(scale):
        return jnp.sum(scan(lambda p, x: layer(p, x * scale), {**floats, **integers}, x)[0])

    run = {"jit of grad": lambda: jax.jit(jax.grad(loss)), "grad of jit": lambda: jax.grad(jax.jit(loss))}
    with pytest.raises(ValueError, match=r"closes over a traced float32\[\] value.*shared="):
        run.get(order, lambda: jax.grad(loss))()(2.0)


def test_closing_over_a_constant_is_fine():
    table = jnp.linspace(0.5, 1.5, 32)
    y, _, _ = scan(lambda p, x: layer(p, x * table), *make([3, 4]))
    assert y.shape == (64, 32)


def test_a_layer_that_reports_no_rows():
    with pytest.raises(ValueError, match=r"tags h0, h1, out, xs for the stash but returns no valid rows"):
        scan(lambda p, x: (layer(p, x)[0], None), *make([3, 4]))


def test_a_layer_that_reports_rows_twice_or_in_floats():
    def twice(params, x):
        x, aux = layer(params, x)
        return x, (aux, aux["rows"])

    def floats(params, x):
        return layer(params, x)[0], Rows(jnp.float32(0), params["count"])

    with pytest.raises(ValueError, match="returns 2 Rows"):
        scan(twice, *make([3, 4]))
    with pytest.raises(TypeError, match=r"Rows.start.*float32.*expected an integer"):
        scan(floats, *make([3, 4]))


def test_a_carry_that_changes():
    with pytest.raises(TypeError, match=r"changes carry\['x'\] from float32\[64,32\] to bfloat16\[64,32\]"):
        scan(lambda p, c: ({"x": c["x"].astype(jnp.bfloat16)}, None), make([3, 4])[0], {"x": make([3, 4])[1]})
    with pytest.raises(TypeError, match="must return the structure that it is given"):
        scan(lambda p, x: ((x, x), None), *make([3, 4]))
    with pytest.raises(TypeError, match=r"expected a pair \(carry, aux\)"):
        scan(lambda p, x: x, *make([3, 4]))


def test_params_that_are_not_stacked():
    params, x = make([3, 4])
    with pytest.raises(ValueError, match="leading sizes"):
        scan(layer, {**params, "count": jnp.int32(3)}, x)
    with pytest.raises(ValueError, match="2 layer functions but 1 stacks"):
        scan([layer, layer], [params], x)


def test_rows_for_many_shards_need_a_mesh():
    def many(params, x):
        return layer(params, x)[0], Rows(jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.int32))

    with pytest.raises(ValueError, match="pass mesh="):
        scan(many, *make([3, 4]))


def test_rows_have_to_match_the_mesh():
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = make([3, 4])
    with pytest.raises(ValueError, match="split over 4 shards; return one entry per shard"):
        stash_scan(layer, x, params, policy=StashPolicy(names=NAMES), mesh=mesh)
    with pytest.raises(ValueError, match=r"axes \['tensor'\] are not in the mesh"):
        stash_scan(layer, x, params, policy=StashPolicy(names=NAMES), mesh=mesh, axes="tensor")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ()}, "names is empty"),
        ({"keep": ("h0",)}, "in names and in keep"),
        ({"capacity_factor": -1.0}, "capacity_factor is -1.0"),
        ({"expected_rows": 0}, "expected_rows is 0"),
        ({"page_rows": 0}, "page_rows is 0"),
        ({"on_overflow": "drop"}, "one of 'recompute', 'poison', 'error'"),
        ({"memory": "disk"}, "one of 'device', 'pinned_host'"),
    ],
)
def test_a_policy_checks_itself(changes, message):
    with pytest.raises(ValueError, match=message):
        StashPolicy(**{"names": NAMES, **changes})


def test_names_are_not_one_string():
    with pytest.raises(TypeError, match="write names="):
        StashPolicy(names="h0")
