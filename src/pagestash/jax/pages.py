"""The valid rows of a layer's tensors on their way into the shared buffer and back, on one shard.

In, they are copied page by page. Back, they are read where they lie, as part of the operation that needs them;
only out of host memory are they copied first.

A bump pointer is all the allocator there is: backward takes layers in the reverse of forward's order, so the
pages are a stack. The pointer advances by the rows used (rounded up to a granule), not by whole pages; the
last page's tail is garbage that the next tensor overwrites, so a long page costs no room.

    buffer   |- tag 0 -|- tag 1 -|-- tag 2 --|- tag 0 of the next layer …
    tag      w0 … w0 + extent, in pages; the last page starts early enough to end inside the tensor
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
    """Where one layer's rows lie; integers on the device, one a shard."""

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
    """Reserve room for a layer's rows; returns where they go and the pointer after them."""
    start, end = _existing(rows, group.capacity)
    first, extent = _window(group, start, end)
    last_page = _page_row(group, first, jnp.maximum(_pages(group, extent) - 1, 0))
    reach = jnp.zeros_like(pointer)  # the furthest unit any write touches, garbage tails included
    for k, unit in enumerate(group.units):
        section = extent // group.granule * sum(group.units[:k])
        reach = jnp.maximum(reach, section + (last_page - first + group.page) // group.granule * unit)
    # Compared as room left, not as pointer + reach, which could pass the int32 range.
    fits = (extent == 0) | (reach <= geometry.buffer_units - pointer)
    used = jnp.where(fits, extent // group.granule * sum(group.units), 0)
    return Placement(pointer, start, end, fits.astype(jnp.int32)), pointer + used


def push(
    geometry: Geometry,
    group: GroupGeometry,
    buffer: jax.Array,
    placement: Placement,
    tensors: Sequence[jax.Array],
    space: Any,
) -> jax.Array:
    """Write the valid rows of `tensors` where `placement` says; the buffer is updated in place."""
    words = [to_words(tensor, geometry.word) for tensor in tensors]
    first, extent = _window(group, placement.start, placement.end)
    pages = jnp.where(placement.fits != 0, _pages(group, extent), 0)

    def write_page(trip: jax.Array, buffer: jax.Array) -> jax.Array:
        # From the last page to the first: only the last page has a garbage tail, and it can reach into the
        # sections of later tags, which are written after it (later in this trip, or in a later trip).
        row = _page_row(group, first, pages - 1 - trip)
        for k, tensor in enumerate(words):
            page = lax.dynamic_slice_in_dim(tensor, row, group.page)
            page = page.reshape(-1, geometry.unit_words)
            if space is not None:
                page = jax.device_put(page, space)
            offset = _offset(group, placement.pointer, first, extent, row, k)
            buffer = lax.dynamic_update_slice_in_dim(buffer, page, offset, 0)
        return buffer

    return lax.fori_loop(0, pages, write_page, buffer)


def pop(
    geometry: Geometry, group: GroupGeometry, buffer: jax.Array, placement: Placement, space: Any
) -> list[jax.Array]:
    """Read a layer's tensors back at full size; rows that are not valid are zero."""
    # Code that consumes every row (an unsort with zero weights) must not meet garbage: 0 × NaN is NaN.
    return _view(geometry, group, buffer, placement) if space is None else _fetch(group, buffer, placement)


def _view(
    geometry: Geometry, group: GroupGeometry, buffer: jax.Array, placement: Placement
) -> list[jax.Array]:
    """Each tensor as a gather from the buffer and a mask: nothing to run by itself.

    XLA fuses both into whatever reads the tensor, so no full-size copy is written.
    """
    first, extent = _window(group, placement.start, placement.end)
    valid = _valid(placement, jnp.arange(group.capacity))
    tensors = []
    for k, tag in enumerate(group.tags):
        unit = jnp.arange(group.capacity // group.granule * group.units[k])
        relative = unit - first // group.granule * group.units[k]
        stored = (relative >= 0) & (relative < extent // group.granule * group.units[k])
        begin = _offset(group, placement.pointer, first, extent, first, k)
        # Rows that were not stored all look at one unit, which costs no bandwidth (H200, 16 layers: 150.4 ms
        # a step; 152.4 where they look at what lies around).
        units = buffer.at[jnp.where(stored, begin + relative, 0)].get(mode="promise_in_bounds")
        tensors.append(_masked(valid, from_words(units.reshape(group.capacity, -1), tag)))
    return tensors


def _fetch(group: GroupGeometry, buffer: jax.Array, placement: Placement) -> list[jax.Array]:
    """Each tensor copied page by page out of host memory, which no kernel of the layer reads in place."""
    first, extent = _window(group, placement.start, placement.end)
    blank = [vary_as(jnp.zeros(tag.shape, tag.dtype), buffer) for tag in group.tags]

    def read_page(trip: jax.Array, tensors: list[jax.Array]) -> list[jax.Array]:
        row = _page_row(group, first, trip)
        valid = _valid(placement, row + jnp.arange(group.page))
        read = []
        for k, (tag, tensor) in enumerate(zip(group.tags, tensors)):
            offset = _offset(group, placement.pointer, first, extent, row, k)
            units = group.page // group.granule * group.units[k]
            page = jax.device_put(lax.dynamic_slice_in_dim(buffer, offset, units), jax.memory.Space.Device)
            page = _masked(valid, from_words(page.reshape(group.page, -1), tag))
            read.append(lax.dynamic_update_slice_in_dim(tensor, page, row, 0))
        return read

    return lax.fori_loop(0, _pages(group, extent), read_page, blank)


def _existing(rows: Rows, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Start and end of the window as int32; one that reaches past the tensor means the rows that exist.

    Every step is bounded first: `start + count` can wrap in the dtype they come in.
    """
    start = _as_int32(rows.start, -(2**31), capacity)
    count = _as_int32(rows.count, 0, 2**31 - 1)
    # A negative start plus a count stays within int32; from row 0 on, only what the tensor has left counts.
    end = jnp.where(start < 0, start + count, start + jnp.minimum(count, capacity - start))
    start = jnp.maximum(start, 0)
    return start, jnp.clip(end, start, capacity)


def _as_int32(given: ArrayLike, least: int, most: int) -> jax.Array:
    value = jnp.asarray(given)
    limits = jnp.iinfo(value.dtype)
    if limits.bits > 32 or limits.max > 2**31 - 1:  # narrowed, it could wrap
        value = jnp.clip(value, max(least, int(limits.min)), most)
    return jnp.clip(value.astype(jnp.int32), least, most)


def _valid(placement: Placement, rows: jax.Array) -> jax.Array:
    return (rows >= placement.start) & (rows < placement.end)


def _masked(valid: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.where(valid.reshape(-1, *(1,) * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


def _window(group: GroupGeometry, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stored stretch in whole granules: its first row and its length (0 where no row is valid).

    A short window near the tensor's end is stored from further up, so that its one page lies inside.
    """
    granule = group.granule
    first = jnp.minimum(start // granule * granule, group.capacity - group.page)
    extent = -(-end // granule) * granule - first
    return first, jnp.where(end > start, extent, 0)


def _pages(group: GroupGeometry, extent: jax.Array) -> jax.Array:
    return -(-extent // group.page)


def _page_row(group: GroupGeometry, first: jax.Array, page: jax.Array) -> jax.Array:
    """First row of a page. The last one may overlap its neighbour, with the same rows in both."""
    return jnp.minimum(first + page * group.page, group.capacity - group.page)


def _offset(
    group: GroupGeometry, pointer: jax.Array, first: jax.Array, extent: jax.Array, row: jax.Array, k: int
) -> jax.Array:
    section = extent // group.granule * sum(group.units[:k])
    return pointer + section + (row - first) // group.granule * group.units[k]
