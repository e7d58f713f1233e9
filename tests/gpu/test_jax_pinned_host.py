"""Gradients on a GPU, with the buffer in device memory and in pinned host memory.

Reading host memory in reverse has given silently wrong gradients in XLA before, so this is checked where it
runs.
"""

import importlib.util
import os
from functools import partial

import pytest

if importlib.util.find_spec("jaxlib") is None:
    pytest.skip("jax is missing: pip install pagestash[jax]", allow_module_level=True)

os.environ.setdefault(
    "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
)  # other tests of this process need the GPU too

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pagestash.jax import Rows, StashPolicy, stash_scan
from pagestash.jax.moe import STASHED, X_SORTED, RingConfig, init_experts, ring_moe
from pagestash.jax.moe.decoder import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax has no GPU here"),
]

CONFIG = RingConfig(width=256, expert_width=256, experts=16, top_k=4, shards=4)
TOKENS, LAYERS, NAMES = 2048, 8, (X_SORTED, *STASHED)
EXPECTED = TOKENS * CONFIG.top_k // CONFIG.shards
# Two programs add in different orders. n roundings, up as often as down, come to about sqrt(n)·eps of the largest
# entry; four times that is allowed (7e-5). n counts the terms of the matmuls of 8 layers, forward and backward, and
# the rows of a weight's gradient.
SUMMED = 2 * LAYERS * (2 * CONFIG.width + 2 * CONFIG.expert_width) + TOKENS * CONFIG.top_k
ROUNDING = 4 * SUMMED**0.5 * 2.0**-23
ROW_BYTES = 4 * (2 * CONFIG.width + 2 * CONFIG.expert_width)


def layer(weights, x):
    y, rows, balance = ring_moe(weights, rms_norm(x, jnp.ones(())), CONFIG)
    return x + y, {"rows": rows, "balance": balance}


def plain_scan(x, weights):
    names = jax.checkpoint_policies.save_only_these_names(*NAMES)
    saved = jax.checkpoint(layer, policy=names, prevent_cse=False)
    return *jax.lax.scan(lambda carry, w: saved(w, carry), x, weights), None


def stashed_scan(x, weights, **changes):
    policy = StashPolicy(**{"names": NAMES, "expected_rows": EXPECTED, "fill": float("nan"), **changes})
    return stash_scan(layer, x, weights, policy=policy)


def compile_step(scan):
    def loss(weights, x):
        y, aux, report = scan(x, weights)
        return jnp.mean(y * y) + aux["balance"].mean(), report

    # TF32 would round differently in each program; full f32 leaves only the order of sums.
    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*inputs()).compile()


def inputs():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = jax.vmap(lambda key: init_experts(key, CONFIG))(keys)
    held = {name: getattr(weights, name)[:, : CONFIG.local_experts] for name in weights._fields[1:]}
    return weights._replace(**held), jax.random.normal(jax.random.key(1), (TOKENS, CONFIG.width))


@pytest.fixture(scope="module")
def plain():
    step = compile_step(plain_scan)
    return step, step(*inputs())


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("factor", [1.25, 0.5, 0.0])
def test_gradients_are_the_plain_scans(plain, memory, factor):
    (loss, report), grads = compile_step(partial(stashed_scan, memory=memory, capacity_factor=factor))(
        *inputs()
    )
    (wanted, _), wanted_grads = plain[1]
    got, want = (loss, grads), (wanted, wanted_grads)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want)):
        scale = float(jnp.abs(theirs).max())
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING * scale, err_msg=where)
    assert (int(report.layers_recomputed) > 0) == (factor < 1)


@jax.custom_vjp
def reveal(sink, value):
    """Zero; the gradient of `sink` is the value that backward was handed."""
    return jnp.zeros(())


reveal.defvjp(lambda sink, value: (jnp.zeros(()), value), lambda value, _: (value, jnp.zeros_like(value)))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_backward_gets_the_bytes_that_forward_gave(memory):
    """Layers that only move bytes: no rounding is XLA's to choose, so every bit counts."""
    kinds = {"wide": (jnp.float32, np.uint32), "narrow": (jnp.bfloat16, np.uint16)}
    layers, rows = 6, 512
    random = np.random.default_rng(0)
    starts, counts = [0, 100, 511, 0, 300, 7], [512, 64, 1, 0, 212, 250]
    finite = {"wide": 0x7F000000, "narrow": 0x7F00}  # patterns below these are neither NaN nor infinite
    given = {
        name: random.integers(0, finite[name], (layers, rows, 96)).astype(bits)
        for name, (_, bits) in kinds.items()
    }

    def moved(params, x):
        for name, (kind, _) in kinds.items():
            value = jnp.flip(jax.lax.bitcast_convert_type(params[name], kind), 0)
            x += reveal(params["sink"][name], checkpoint_name(value, name))
        return x, Rows(params["start"], params["count"])

    def loss(sink, given, policy):
        params = {**given, "sink": sink, "start": jnp.asarray(starts), "count": jnp.asarray(counts)}
        y, _, report = stash_scan(moved, jnp.float32(0), params, policy=policy)
        return y, report

    sink = {name: jnp.zeros(given[name].shape, kind) for name, (kind, _) in kinds.items()}
    policy = StashPolicy(names=tuple(kinds), page_rows=64, memory=memory, fill=float("nan"))
    shown, report = jax.jit(jax.grad(partial(loss, policy=policy), has_aux=True))(sink, given)
    assert int(report.rows_wanted) == sum(counts)
    for name, (_, bits) in kinds.items():
        for index, (start, count) in enumerate(zip(starts, counts)):
            wanted = np.zeros_like(given[name][index])
            wanted[start : start + count] = given[name][index][::-1][start : start + count]
            assert np.array_equal(np.asarray(shown[name][index]).view(bits), wanted), (name, index)


def test_the_buffer_is_where_it_was_sent(plain):
    device = compile_step(partial(stashed_scan, memory="device")).memory_analysis()
    host = compile_step(partial(stashed_scan, memory="pinned_host")).memory_analysis()
    buffer = int(1.25 * LAYERS * EXPECTED) * ROW_BYTES
    assert device.host_temp_size_in_bytes == 0
    assert host.host_temp_size_in_bytes == pytest.approx(buffer, rel=0.02)
    assert device.temp_size_in_bytes - host.temp_size_in_bytes >= 0.9 * buffer
    assert device.temp_size_in_bytes < plain[0].memory_analysis().temp_size_in_bytes


def test_automatic_pages_are_long_on_a_gpu():
    from pagestash.jax.geometry import Tag, lay_out

    tag = Tag("t", (65_536, 1024), jnp.dtype("bfloat16"))
    given = {"capacity_factor": 1.25, "expected_rows": 16_384, "page_rows": "auto"}
    assert lay_out([([tag], 2)], backend=jax.default_backend(), **given).groups[0].page == 8192
