"""What the compiler made of it: one buffer, updated in place, nothing computed twice, few bytes a layer."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo_text import Hlo, copies_of
from jax import lax
from ragged_model import CAPACITY, NAMES, loss_of, make, plain_scan, split, with_stash

from pagestash.jax import StashPolicy, stash_scan
from pagestash.jax.geometry import Tag, lay_out
from pagestash.jax.moe import STASHED, X_SORTED, RingConfig, init_experts, ring_moe_over

LAYERS, ROW_BYTES = 8, 4 * (32 + 48 + 48 + 32)


def policy(**changes):
    given = {"names": NAMES, "expected_rows": CAPACITY // 4, "capacity_factor": 1.25, "page_rows": 16}
    return StashPolicy(**{**given, **changes})


def compile_step(scan, layers=LAYERS):
    params, x = make([CAPACITY // 4] * layers)
    floats, integers = split(params)
    step = jax.value_and_grad(loss_of(scan), argnums=(0, 2), has_aux=True)
    return jax.jit(step).lower(floats, integers, x).compile()


def buffer_shape(layers=LAYERS):
    widths = {"xs": 32, "h0": 48, "h1": 48, "out": 32}
    tags = [Tag(name, (CAPACITY, widths[name]), jnp.dtype("float32")) for name in NAMES]
    geometry = lay_out(
        [(tags, layers)], capacity_factor=1.25, expected_rows=CAPACITY // 4, page_rows=16, backend="cpu"
    )
    assert geometry.nbytes == 1.25 * layers * (CAPACITY // 4) * ROW_BYTES
    return f"f32[{geometry.shape[0]},{geometry.shape[1]}]"


@pytest.fixture(scope="module")
def stashed():
    return Hlo.of(compile_step(with_stash(policy())))


def test_the_buffer_is_in_the_loops_and_is_never_copied_there(stashed):
    lines = stashed.loop_lines()
    assert any(buffer_shape() in line and "dynamic-update-slice" in line for line in lines)
    assert copies_of(lines, buffer_shape()) == []


def test_one_buffer_serves_all_layers_and_widths(stashed):
    """Only the shared buffer is as long as several layers' rows; no tensor is stacked by layer."""
    text = "\n".join(line for lines in stashed.computations.values() for line in lines)
    assert buffer_shape() in text
    for width in (32, 48):
        assert f"f32[{LAYERS},{CAPACITY},{width}]" not in text
    plain = compile_step(plain_scan).as_text()
    assert f"f32[{LAYERS},{CAPACITY},48]" in plain


def test_the_copy_check_sees_a_copy():
    """A loop that writes a buffer and still needs the old one has to copy it."""

    def body(carry, row):
        new = lax.dynamic_update_slice(carry[0], row[None], (carry[1], 0))
        return (new, carry[1] + 1), jnp.sum(jnp.sin(carry[0]) * new)

    program = jax.jit(lambda b, rows: lax.scan(body, (b, 0), rows)).lower(
        jnp.zeros((64, 16)), jnp.ones((8, 16))
    )
    assert copies_of(Hlo.of(program.compile()).loop_lines(), "f32[64,16]") != []


@pytest.mark.slow
def test_nothing_is_recomputed_while_pages_last(stashed):
    plain = Hlo.of(compile_step(plain_scan)).matmuls()
    assert plain > 0
    assert stashed.matmuls(without_branch=0) == plain
    assert Hlo.of(compile_step(with_stash(policy(on_overflow="poison")))).matmuls() == plain
    # With room for the worst case there is no branch at all.
    assert Hlo.of(compile_step(with_stash(policy(expected_rows=None)))).matmuls() == plain
    # And the measure can tell: without a policy every matmul of forward is there twice.
    assert Hlo.of(compile_step(partial(plain_scan, names=()))).matmuls() > plain


def assembled(hlo, width):
    """Where a loop writes a full-size tensor of this width piece by piece, or a branch hands one out."""
    shape = re.escape(f"f32[{CAPACITY},{width}]")
    piecewise = re.compile(rf"= {shape}\S* dynamic-update-slice\(")
    handed_out = re.compile(rf"= .*{shape}.* conditional\(")
    return [line for line in hlo.lines(without_branch=0) if piecewise.search(line) or handed_out.search(line)]


def test_backward_reads_the_buffer_where_it_lies(stashed):
    """Tensors are put together again only on their way from the host, where nothing can be read in place."""
    on_host = Hlo.of(compile_step(with_stash(policy(memory="pinned_host"))))
    for width in (32, 48):
        assert assembled(stashed, width) == []
        assert assembled(on_host, width) != []


@pytest.mark.slow
def test_a_microbatch_loop_does_not_multiply_the_buffer():
    params, x = make([CAPACITY // 4] * LAYERS)
    floats, integers = split(params)
    grad = jax.grad(lambda f, x: loss_of(with_stash(policy()))(f, integers, x)[0])

    def accumulate(floats, batches):
        add = lambda total, x: (jax.tree.map(jnp.add, total, grad(floats, x)), None)  # noqa: E731
        return lax.scan(add, jax.tree.map(jnp.zeros_like, floats), batches)[0]

    once = jax.jit(grad).lower(floats, x).compile().memory_analysis().temp_size_in_bytes
    program = jax.jit(accumulate).lower(floats, jnp.stack([x] * 4)).compile()
    accumulator = sum(leaf.nbytes for leaf in jax.tree.leaves(floats))
    assert program.memory_analysis().temp_size_in_bytes <= once + 2 * accumulator + 2**16
    assert copies_of(Hlo.of(program).loop_lines(), buffer_shape()) == []


def ring_step(mesh, layers, scan):
    config = RingConfig(width=64, expert_width=64, experts=16, top_k=4, shards=4)
    weights = jax.eval_shape(
        lambda key: jax.vmap(lambda k: init_experts(k, config))(jax.random.split(key, layers)),
        jax.random.key(0),
    )
    mixture = ring_moe_over(mesh, config)
    split_by = [jax.NamedSharding(mesh, jax.P())] + [jax.NamedSharding(mesh, jax.P(None, "expert"))] * 3
    weights = type(weights)(
        *(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=s) for w, s in zip(weights, split_by))
    )
    x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("expert")))

    def ring_layer(params, x):
        y, rows, _ = mixture(params, x)
        return x + y, {"rows": rows}

    loss = lambda w, x: jnp.sum(scan(ring_layer, x, w)[0] ** 2)  # noqa: E731
    return jax.jit(jax.grad(loss)).lower(weights, x).compile()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.slow
def test_stashed_bytes_a_layer_are_a_third_of_plain_on_four_devices(mesh):
    """Ratio 4, factor 1.25: each further layer costs 1.25 / 4 of its saved rows, plus its input."""
    names = (*STASHED, X_SORTED)
    chosen = StashPolicy(names=names, expected_rows=512, capacity_factor=1.25, page_rows=128)

    def stash(layer, x, params):
        return stash_scan(layer, x, params, policy=chosen, mesh=mesh)

    def slope(scan):
        few, many = (ring_step(mesh, n, scan).memory_analysis().temp_size_in_bytes for n in (4, 12))
        return (many - few) / 8

    plain, stashed = slope(partial(plain_scan, names=names)), slope(stash)
    saved = 2048 * 4 * 64 * 4
    assert plain == pytest.approx(saved, rel=0.05)
    assert stashed / plain <= 0.33


@pytest.mark.slow
def test_collectives_agree_once(mesh):
    """One reduction for all layers' flags and counters, outside the loops."""
    chosen = StashPolicy(names=STASHED, expected_rows=512, capacity_factor=1.25, page_rows=128)
    hlo = Hlo.of(ring_step(mesh, 4, lambda f, x, p: stash_scan(f, x, p, policy=chosen, mesh=mesh)))
    integers = [
        line
        for lines in hlo.computations.values()
        for line in lines
        if " all-reduce(" in line and "= s32[" in line
    ]
    assert len(integers) == 1
    assert integers[0] not in hlo.loop_lines()
