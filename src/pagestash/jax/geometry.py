"""How tensors of several widths and dtypes share one buffer of words.

Legend: N row capacity of a tagged tensor, W words in one of its rows, U units of the buffer, w words in a unit.

    w = granule × gcd of all W

So `granule` consecutive rows of any tensor are a whole number of units, and a layer's tensors lie one behind
the other without gaps. Offsets count units, not words: a 52 GB buffer has more words than an int32 can count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Units of this size keep every copy aligned; smaller ones would only round counts more finely.
ALIGNED_BYTES = 512
# A page is one iteration of a loop. On a GPU an iteration costs several launches and a test of the loop's condition
# (H200, 8 layers: 64-row pages 188 ms a step, 8,192-row pages 97 ms, no stash 97 ms); on a CPU it costs nothing.
PAGE_ROWS = {"cpu": 256, "gpu": 8192, "tpu": 2048}
# The row capacity has at least this many pages, so that the padding of a layer's last page stays small.
PAGES_A_LAYER = 8


@dataclass(frozen=True, slots=True)
class Tag:
    """One stashed tensor of a layer, as one shard sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The tags of one group of layers: row capacity, page, and each tag's units per granule of rows."""

    tags: tuple[Tag, ...]
    layers: int
    capacity: int
    page: int
    granule: int
    units: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return sum(tag.row_bytes for tag in self.tags)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The whole buffer of one shard."""

    groups: tuple[GroupGeometry, ...]
    word: Any
    unit_words: int
    buffer_units: int
    rows: int
    """Rows that the buffer was sized for, over all layers that stash."""

    @property
    def nbytes(self) -> int:
        return self.buffer_units * self.unit_words * np.dtype(self.word).itemsize

    @property
    def shape(self) -> tuple[int, int]:
        return self.buffer_units, self.unit_words

    def never_fits(self, group: GroupGeometry) -> bool:
        """Whether the buffer is too small for one page of each tag, so that no code to stash them is needed."""
        page = group.page // group.granule
        smallest = (sum(group.units[:k]) + page * unit for k, unit in enumerate(group.units))
        return self.buffer_units < max(smallest, default=0)

    @property
    def always_fits(self) -> bool:
        """Whether the worst case of every layer fits, so that no recomputation is needed."""
        worst = sum(g.layers * (g.capacity // g.granule) * sum(g.units) for g in self.groups)
        return self.buffer_units >= worst


def lay_out(
    groups: Sequence[tuple[Sequence[Tag], int]],
    *,
    capacity_factor: float,
    expected_rows: int | None,
    page_rows: int | str,
    backend: str,
) -> Geometry:
    """Size the buffer for groups of `(tags, layers)`; every tag of a group has the same leading size."""
    tags = [tag for group, _ in groups for tag in group]
    word = _common_word([tag.dtype for tag in tags])
    word_bytes = np.dtype(word).itemsize
    common_width = math.gcd(*(tag.row_bytes // word_bytes for tag in tags)) or 1
    pages = [_page(group[0].shape[0], page_rows, backend) if group else 0 for group, _ in groups]
    granule = _granule(math.gcd(*pages), common_width * word_bytes)

    laid, rows, words = [], 0, 0
    for (group, layers), page in zip(groups, pages):
        capacity = group[0].shape[0] if group else 0
        units = tuple(tag.row_bytes // word_bytes // common_width for tag in group)
        laid.append(GroupGeometry(tuple(group), layers, capacity, page, granule, units))
        if group:
            group_rows = math.ceil(capacity_factor * layers * (expected_rows or capacity))
            rows += group_rows
            words += group_rows * sum(units) * common_width
    unit_words = granule * common_width
    buffer_units = math.ceil(words / unit_words)
    if buffer_units >= 2**31:
        raise ValueError(
            f"the buffer would have {buffer_units:,} units of {unit_words * word_bytes} bytes, more than an "
            "int32 can count; choose page_rows divisible by a larger power of two, or stash wider tensors"
        )
    return Geometry(tuple(laid), word, unit_words, buffer_units, rows)


def _common_word(dtypes: list[Any]) -> Any:
    """The tensors' dtype if they agree (no bit cast), else unsigned integers as wide as the narrowest."""
    distinct = {np.dtype(d) for d in dtypes}
    if not distinct:
        return jnp.uint8.dtype
    if len(distinct) == 1 and np.dtype(bool) not in distinct:
        return distinct.pop()
    narrowest = 1 if np.dtype(bool) in distinct else min(d.itemsize for d in distinct)
    return np.dtype(f"uint{8 * narrowest}")


def _page(capacity: int, page_rows: int | str, backend: str) -> int:
    if page_rows == "auto":
        largest = min(PAGE_ROWS.get(backend, PAGE_ROWS["gpu"]), max(capacity // PAGES_A_LAYER, 1))
        return next(page for page in range(largest, 0, -1) if capacity % page == 0)
    page = int(page_rows)
    if page > capacity or capacity % page:
        near = [p for p in range(1, capacity + 1) if capacity % p == 0]
        below = max((p for p in near if p <= page), default=near[0])
        above = min((p for p in near if p >= page), default=near[-1])
        choice = f"{below}" if below == above else f"{below} or {above}"
        raise ValueError(
            f"page_rows={page} does not divide the row capacity {capacity}: the last page would reach past "
            f"the tensor's end. Choose a divisor ({choice}), or page_rows='auto'."
        )
    return page


def _granule(page: int, unit_row_bytes: int) -> int:
    granule = 1
    while granule * unit_row_bytes < ALIGNED_BYTES and page % (2 * granule) == 0 and page:
        granule *= 2
    return granule


def to_words(tensor: jax.Array, word: Any) -> jax.Array:
    """`tensor` as [rows, words per row], its bits unchanged."""
    rows = tensor.shape[0]
    flat = tensor.reshape(rows, -1)
    if flat.dtype == word:
        return flat
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(flat, word).reshape(rows, -1)


def from_words(words: jax.Array, tag: Tag) -> jax.Array:
    """The inverse of `to_words`, from [rows, words per row]; rows may be fewer than the tag's."""
    rows = words.shape[0]
    shape = (rows, *tag.shape[1:])
    target = np.dtype(jnp.uint8) if tag.dtype == jnp.bool_ else np.dtype(tag.dtype)
    if words.dtype == target:
        flat = words
    else:
        ratio = target.itemsize // np.dtype(words.dtype).itemsize
        grouped = words.reshape(rows, -1, ratio) if ratio > 1 else words
        flat = jax.lax.bitcast_convert_type(grouped, target)
    return flat.reshape(shape).astype(tag.dtype)
