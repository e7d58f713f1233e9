"""The copy loops against a plain model: any windows, any widths, what was pushed comes back and no more."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from support.tiers import sweep

from pagestash.jax import Rows
from pagestash.jax.geometry import Tag, from_words, lay_out, to_words
from pagestash.jax.pages import place, pop, push
from pagestash.jax.shards import HOST

CAPACITY, LAYERS = 48, 4
SHAPES = {
    "one width": [((6,), "float32")],
    "several widths": [((4,), "float32"), ((12,), "float32"), ((1,), "float32")],
    "several dtypes": [
        ((3, 2), "float32"),
        ((5,), "bfloat16"),
        ((), "uint8"),
        ((7,), "float8_e4m3fn"),
        ((2,), "bool"),
    ],
}


def tags_of(kind):
    return [
        Tag(f"t{i}", (CAPACITY, *shape), jnp.dtype(dtype)) for i, (shape, dtype) in enumerate(SHAPES[kind])
    ]


@cache
def geometry_of(kind, page, factor):
    return lay_out(
        [(tags_of(kind), LAYERS)],
        capacity_factor=factor,
        expected_rows=CAPACITY // 2,
        page_rows=page,
        backend="cpu",
    )


@cache
def programs(kind, page, factor, space):
    geometry = geometry_of(kind, page, factor)
    group = geometry.groups[0]
    return (
        geometry,
        jax.jit(partial(place, geometry, group)),
        jax.jit(lambda b, at, tensors: push(geometry, group, b, at, tensors, space)),
        jax.jit(lambda b, at: pop(geometry, group, b, at, space)),
    )


windows = st.tuples(st.integers(0, CAPACITY), st.integers(0, CAPACITY)).map(
    lambda w: (min(w), max(w) - min(w))
)


@sweep(
    4,
    60,
    st.sampled_from(list(SHAPES)),
    st.sampled_from([1, 8]),
    st.sampled_from([0.6, 2.0]),
    st.sampled_from([None, HOST]),
    st.lists(windows, min_size=LAYERS, max_size=LAYERS),
    st.integers(0, 2**16),
)
def test_what_fits_comes_back_and_the_rest_is_zero(kind, page, factor, space, layers, seed):
    geometry, place_, push_, pop_ = programs(kind, page, factor, space)
    if geometry.never_fits(geometry.groups[0]):
        return
    garbage = 0xFF if np.dtype(geometry.word).kind == "u" else np.nan
    buffer, pointer, held = jnp.full(geometry.shape, garbage, geometry.word), jnp.int32(0), []
    buffer = buffer if space is None else jax.device_put(buffer, space)
    random = np.random.default_rng(seed)
    for start, count in layers:
        tensors = [_random(random, tag) for tag in tags_of(kind)]
        at, pointer = place_(pointer, Rows(jnp.int32(start), jnp.int32(count)))
        buffer = push_(buffer, at, tensors)
        held.append((start, count, tensors, at))
        assert int(pointer) <= geometry.buffer_units
    for start, count, tensors, at in reversed(held):
        if int(at.fits):
            for tensor, got in zip(tensors, pop_(buffer, at)):
                wanted = np.zeros(tensor.shape, tensor.dtype)
                wanted[start : start + count] = np.asarray(tensor)[start : start + count]
                assert np.asarray(got).tobytes() == wanted.tobytes()
    if factor == 2.0:  # the worst case of every layer
        assert all(int(at.fits) for *_, at in held)
        assert geometry.always_fits


def test_words_keep_every_bit():
    random = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "float16", "int32", "uint8", "float8_e5m2", "bool"):
        tag = Tag("t", (8, 3, 2), jnp.dtype(dtype))
        tensor = _random(random, tag)
        words = to_words(tensor, np.dtype("uint8"))
        assert words.shape == (8, tag.row_bytes)
        assert np.asarray(from_words(words, tag)).tobytes() == np.asarray(tensor).tobytes()


def test_automatic_pages_follow_the_backend_and_divide():
    def page(capacity, backend):
        tag = Tag("t", (capacity, 1024), jnp.dtype("bfloat16"))
        given = {
            "capacity_factor": 1.25,
            "expected_rows": capacity // 4,
            "page_rows": "auto",
            "backend": backend,
        }
        return lay_out([([tag], 2)], **given).groups[0].page

    assert page(65_536, "gpu") == 8192
    assert page(65_536, "cpu") == 256
    assert page(3 * 5 * 7 * 64, "gpu") == 840
    assert page(7, "cpu") == 1


def test_the_buffer_is_as_long_as_the_factor_says():
    tags = [Tag("a", (4096, 1024), jnp.dtype("bfloat16")), Tag("b", (4096, 512), jnp.dtype("bfloat16"))]
    made = lay_out([(tags, 16)], capacity_factor=1.25, expected_rows=1000, page_rows=512, backend="gpu")
    assert made.nbytes == 1.25 * 16 * 1000 * (1024 + 512) * 2
    assert made.rows == 20_000


def test_a_buffer_past_the_reach_of_an_int32_counts_in_units():
    """DeepSeek-V3's 52.5 GiB has 2.8e10 words; an offset in words would not fit."""
    tag = Tag("moe_mlpwo", (262_144, 7168), jnp.dtype("bfloat16"))
    made = lay_out([([tag], 60)], capacity_factor=1.0, expected_rows=65_536, page_rows="auto", backend="gpu")
    assert made.nbytes / 2**30 == 52.5
    assert made.nbytes // 2 > 2**31 > made.buffer_units


def _random(random, tag):
    """Random bits, but no NaN: equality is on bytes, and a cast may rewrite a NaN's payload."""
    if tag.dtype == jnp.bool_:
        return jnp.asarray(random.integers(0, 2, tag.shape).astype(bool))
    return jnp.asarray(random.integers(-100, 100, tag.shape).astype(np.float32)).astype(tag.dtype)
