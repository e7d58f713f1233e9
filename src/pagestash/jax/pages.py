"""Copy the valid rows of a layer's tensors into the shared buffer and read them back, on one shard.

Forward copies them page by page. Backward reads them in place, as part of the operation that needs them; only from
host memory are they copied first.

The allocator is a bump pointer: backward takes layers in the reverse order of forward, so the pages are a
stack. The pointer advances by the rows used, rounded up to a granule, and not by whole pages. The next tensor
overwrites the last page's tail, which is garbage, so a long page wastes no room.

    buffer   |- tag 0 -|- tag 1 -|-- tag 2 --|- tag 0 of the next layer …
    tag      rows first … first + extent, in pages; the last page starts early enough to end inside the tensor

Legend: U units of the buffer, w words in a unit, N row capacity, P rows of a page, W words in a row of a
tensor; u the units of one page or one tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .geometry import Geometry, GroupGeometry, from_words, to_words
from .policy import Rows
from .shards import vary_as


class Placement(NamedTuple):
    """Where one layer's rows lie; integers on the device, one per shard."""

    pointer: jax.Array
    """First unit of the layer in the buffer."""
    start: jax.Array
    end: jax.Array
    """Valid rows are `start … end - 1`."""
    fits: jax.Array
    """1 where the layer was written, 0 where there was no room."""


def place(
    geometry: Geometry, group: GroupGeometry, pointer: jax.Array, rows: Rows
) -> tuple[Placement, jax.Array]:
    """Reserve room for a layer's rows: their placement, and the pointer after them."""
    start, end = _existing(rows, group.capacity)
    first, extent = _window(group, start, end)
    last_page = _page_row(group, first, jnp.maximum(_pages(group, extent) - 1, 0))
    reach = jnp.zeros_like(pointer)  # the furthest unit that any write touches, garbage tails included
    for k, unit in enumerate(group.units):
        section = extent // group.granule * sum(group.units[:k])
        reach = jnp.maximum(reach, section + (last_page - first + group.page) // group.granule * unit)
    # `reach <= room left` and not `pointer + reach <= room`, which could overflow an int32.
    fits = (extent == 0) | (reach <= geometry.buffer_units - pointer)
    used = jnp.where(fits, extent // group.granule * sum(group.units), 0)
    return Placement(pointer, start, end, fits.astype(jnp.int32)), pointer + used


def push(
    geometry: Geometry,
    group: GroupGeometry,
    buffer_Uw: jax.Array,
    placement: Placement,
    tensors: Sequence[jax.Array],
    space: Any,
) -> jax.Array:
    """Write the valid rows of `tensors` to their placement; the buffer is updated in place."""
    all_words_NW = [to_words(tensor, geometry.word) for tensor in tensors]
    first, extent = _window(group, placement.start, placement.end)
    pages = jnp.where(placement.fits != 0, _pages(group, extent), 0)

    def write_page(number: jax.Array, buffer_Uw: jax.Array) -> jax.Array:
        # From the last page to the first: only the last page has a garbage tail. It can reach into the sections of
        # later tags, which are written after it, in this iteration or a later one.
        row = _page_row(group, first, pages - 1 - number)
        for k, words_NW in enumerate(all_words_NW):
            page_PW = lax.dynamic_slice_in_dim(words_NW, row, group.page)
            page_uw = page_PW.reshape(-1, geometry.unit_words)
            if space is not None:
                page_uw = jax.device_put(page_uw, space)
            offset = _offset(group, placement.pointer, first, extent, row, k)
            buffer_Uw = lax.dynamic_update_slice_in_dim(buffer_Uw, page_uw, offset, 0)
        return buffer_Uw

    return lax.fori_loop(0, pages, write_page, buffer_Uw)


def pop(
    geometry: Geometry, group: GroupGeometry, buffer_Uw: jax.Array, placement: Placement, space: Any
) -> list[jax.Array]:
    """A layer's tensors at full size; invalid rows are zero."""
    # Code that reads every row (an unsort with zero weights) must not get garbage: 0 × NaN is NaN.
    if space is None:
        return _view(geometry, group, buffer_Uw, placement)
    return _fetch(group, buffer_Uw, placement)


def _view(
    geometry: Geometry, group: GroupGeometry, buffer_Uw: jax.Array, placement: Placement
) -> list[jax.Array]:
    """Each tensor as a gather from the buffer and a mask.

    XLA fuses both into the operation that reads the tensor, so no full-size copy is written.
    """
    first, extent = _window(group, placement.start, placement.end)
    valid_N = _valid(placement, jnp.arange(group.capacity))
    tensors = []
    for k, tag in enumerate(group.tags):
        unit_u = jnp.arange(group.capacity // group.granule * group.units[k])
        relative_u = unit_u - first // group.granule * group.units[k]
        stored_u = (relative_u >= 0) & (relative_u < extent // group.granule * group.units[k])
        begin = _offset(group, placement.pointer, first, extent, first, k)
        # Rows that were not stored all read unit 0, which costs no bandwidth (H200, 16 layers: 150.4 ms a step;
        # 152.4 if they read the units around them).
        words_uw = buffer_Uw.at[jnp.where(stored_u, begin + relative_u, 0)].get(mode="promise_in_bounds")
        tensors.append(_masked(valid_N, from_words(words_uw.reshape(group.capacity, -1), tag)))
    return tensors


def _fetch(group: GroupGeometry, buffer_Uw: jax.Array, placement: Placement) -> list[jax.Array]:
    """Each tensor copied page by page from host memory, which the layer's kernels cannot read in place."""
    first, extent = _window(group, placement.start, placement.end)
    blank = [vary_as(jnp.zeros(tag.shape, tag.dtype), buffer_Uw) for tag in group.tags]

    def read_page(number: jax.Array, tensors: list[jax.Array]) -> list[jax.Array]:
        row = _page_row(group, first, number)
        valid_P = _valid(placement, row + jnp.arange(group.page))
        read = []
        for k, (tag, tensor) in enumerate(zip(group.tags, tensors)):
            offset = _offset(group, placement.pointer, first, extent, row, k)
            units = group.page // group.granule * group.units[k]
            page_uw = lax.dynamic_slice_in_dim(buffer_Uw, offset, units)
            page_uw = jax.device_put(page_uw, jax.memory.Space.Device)
            page = _masked(valid_P, from_words(page_uw.reshape(group.page, -1), tag))
            read.append(lax.dynamic_update_slice_in_dim(tensor, page, row, 0))
        return read

    return lax.fori_loop(0, _pages(group, extent), read_page, blank)


def _existing(rows: Rows, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Start and end of the valid rows that exist, as int32.

    Both are clipped before they are added: `start + count` can wrap in their own dtype.
    """
    start = _as_int32(rows.start, -(2**31), capacity)
    count = _as_int32(rows.count, 0, 2**31 - 1)
    # A negative start plus a count fits an int32; with another start, at most capacity - start rows exist.
    end = jnp.where(start < 0, start + count, start + jnp.minimum(count, capacity - start))
    start = jnp.maximum(start, 0)
    return start, jnp.clip(end, start, capacity)


def _as_int32(given: ArrayLike, least: int, most: int) -> jax.Array:
    value = jnp.asarray(given)
    limits = jnp.iinfo(value.dtype)
    if limits.bits > 32 or limits.max > 2**31 - 1:  # it could wrap when narrowed
        value = jnp.clip(value, max(least, int(limits.min)), most)
    return jnp.clip(value.astype(jnp.int32), least, most)


def _valid(placement: Placement, rows: jax.Array) -> jax.Array:
    return (rows >= placement.start) & (rows < placement.end)


def _masked(valid: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.where(valid.reshape(-1, *(1,) * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


def _window(group: GroupGeometry, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stored rows in whole granules: the first row and their number (0 if no row is valid).

    A short range near the tensor's end is stored from an earlier row on, so that its page lies inside the tensor.
    """
    granule = group.granule
    first = jnp.minimum(start // granule * granule, group.capacity - group.page)
    extent = -(-end // granule) * granule - first
    return first, jnp.where(end > start, extent, 0)


def _pages(group: GroupGeometry, extent: jax.Array) -> jax.Array:
    return -(-extent // group.page)


def _page_row(group: GroupGeometry, first: jax.Array, page: jax.Array) -> jax.Array:
    """First row of a page. The last page may overlap the one before; both then hold the same rows."""
    return jnp.minimum(first + page * group.page, group.capacity - group.page)


def _offset(
    group: GroupGeometry, pointer: jax.Array, first: jax.Array, extent: jax.Array, row: jax.Array, k: int
) -> jax.Array:
    section = extent // group.granule * sum(group.units[:k])
    return pointer + section + (row - first) // group.granule * group.units[k]
