"""Pinned host memory for tensors of all sizes: extents of slabs, split and joined."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import torch

from pagestash.pages.host import MakeSlab, host_slab

ALIGNMENT = 512
PIECE = 1 << 20
"""If no free extent is large enough, a tensor is spread over several of at least this size. Smaller copies use
the link badly."""
_MOST_BLOCKS, _MOST_FORMS = 4096, 16
"""Steady steps take the same blocks in the same forms. So many are cached: making one costs more than all else."""
_COPIED_AS_THEY_ARE = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)
)
"""Of these dtypes `copy_` copies bits, on every device."""


class Extent(NamedTuple):
    """Bytes `start` to `end` of one slab."""

    slab: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


_extent: Callable[[tuple[int, int, int]], Extent] = partial(tuple.__new__, Extent)
"""Makes one of its fields, in a third of the time."""


class Form(Protocol):
    """How a tensor looks at its bytes. Hashable."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def size(self) -> torch.Size: ...
    @property
    def stride(self) -> tuple[int, ...]: ...


class HostBlock(NamedTuple):
    """Host memory for one tensor, usually in one piece. The pieces have as many bytes as it has."""

    pieces: list[torch.Tensor]
    extents: list[Extent]
    forms: dict[Form, torch.Tensor | None]
    """What `in_form` has made."""

    def in_form(self, form: Form) -> torch.Tensor | None:
        """The block as a tensor of this form, whose bytes it is for.

        None if it is in several pieces, or if the form's elements are not all the bytes of its range, each once.
        """
        try:
            return self.forms[form]
        except KeyError:
            pass
        made = None
        if len(self.pieces) == 1 and form.dtype in _COPIED_AS_THEY_ARE and _is_dense(form):
            made = self.pieces[0].view(form.dtype).as_strided(form.size, form.stride)
        if len(self.forms) >= _MOST_FORMS:
            self.forms.clear()
        self.forms[form] = made
        return made


class HostSlabs:
    """Allocates host memory; the caller orders the copies into and out of it.

    A tensor that does not fit is refused and counted: `wanted` is the size that would have sufficed.
    """

    def __init__(self, device: torch.device, limit: int, make_slab: MakeSlab = host_slab) -> None:
        self.device = device
        self._make_slab = make_slab
        self.limit = limit
        self.used = 0
        self.wanted = 0
        """Peak of bytes used plus bytes refused."""
        self.fixed = False
        """Whether slabs must never move: a captured CUDA graph has their addresses."""
        self._refused = 0
        self._slabs: list[torch.Tensor] = []
        self._free: list[Extent] = []  # by slab and start
        self._blocks: dict[tuple[int, int, int], HostBlock] = {}
        """Blocks in one piece, in use or not, by slab, start and size."""
        self._rows: dict[tuple[int, int, tuple[int, ...]], list[HostBlock]] = {}
        """Blocks side by side, by slab, start of the first, and sizes."""

    @property
    def size(self) -> int:
        """Bytes of host memory, pinned if the device is a GPU."""
        return sum(slab.numel() for slab in self._slabs)

    def take(self, size: int) -> HostBlock | None:
        """A block for `size` bytes, or None without room; `forget` it when the refused tensor is freed."""
        room = -(-size // ALIGNMENT) * ALIGNMENT
        wanted = self.used + self._refused + room
        if wanted > self.wanted:
            self.wanted = wanted
        found = self._carve(room)
        return self._spread(size, room) if found is None else self._block(*found, size)

    def take_row(self, sizes: tuple[int, ...]) -> Sequence[HostBlock] | None:
        """Blocks for tensors of these sizes, side by side: what `take` of each costs, once for all of them.

        None if no free extent is large enough for all. Each block is given back by itself.
        """
        room = aligned_sum(sizes)
        found = self._carve(room)
        if found is None:
            return None
        wanted = self.used + self._refused
        if wanted > self.wanted:
            self.wanted = wanted
        slab, start = found
        row = self._rows.get((slab, start, sizes))
        if row is None:
            if len(self._rows) >= _MOST_BLOCKS:
                self._rows.clear()
            row, at = [], start
            for size in sizes:
                row.append(self._block(slab, at, size))
                at += aligned(size)
            self._rows[slab, start, sizes] = row
        return row

    def _carve(self, room: int) -> tuple[int, int] | None:
        """Take `room` bytes of the smallest free extent that is large enough: its slab and their first byte."""
        free = self._free
        at, least = -1, 0
        for index, (_, start, end) in enumerate(free):
            if end - start >= room and (at < 0 or end - start < least):
                at, least = index, end - start
        if at < 0:
            return None
        slab, start, end = free[at]
        self.used += room
        if start + room == end:
            del free[at]
        else:
            free[at] = _extent((slab, start + room, end))
        return slab, start

    def _block(self, slab: int, start: int, size: int) -> HostBlock:
        block = self._blocks.get((slab, start, size))
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            piece = self._slabs[slab][start : start + size]
            block = HostBlock([piece], [Extent(slab, start, start + aligned(size))], {})
            self._blocks[slab, start, size] = block
        return block

    def _spread(self, size: int, room: int) -> HostBlock | None:
        """A block of the fewest largest free extents that together are large enough."""
        chosen: list[Extent] = []
        missing = room
        for extent in sorted(self._free, key=lambda extent: -extent.size):
            if missing <= 0 or extent.size < min(PIECE, missing):
                break
            chosen.append(extent)
            missing -= extent.size
        if missing > 0:
            self._refused += room
            return None
        self.used += room
        block = HostBlock([], [], {})
        for extent in chosen:
            slab, start, end = extent
            part = min(end - start, room)
            at = bisect_left(self._free, extent)
            if start + part == end:
                del self._free[at]
            else:
                self._free[at] = Extent(slab, start + part, end)
            block.extents.append(Extent(slab, start, start + part))
            block.pieces.append(self._slabs[slab][start : start + min(part, size)])
            room -= part
            size -= part
        return block

    def give(self, block: HostBlock) -> None:
        """Return a block: the next `take` may get its memory."""
        for slab, start, end in block.extents:
            self._free_extent(slab, start, end)

    def give_all(self, blocks: Sequence[HostBlock]) -> None:
        """Return several: those that lie side by side, as a row does, as one."""
        slab, first, last = -1, 0, 0
        for block in blocks:
            for its_slab, start, end in block.extents:
                if start == last and its_slab == slab:
                    last = end
                    continue
                if slab >= 0:
                    self._free_extent(slab, first, last)
                slab, first, last = its_slab, start, end
        if slab >= 0:
            self._free_extent(slab, first, last)

    def _free_extent(self, slab: int, start: int, end: int) -> None:
        free = self._free
        self.used -= end - start
        at = bisect_left(free, (slab, start, end))
        if at < len(free):
            its_slab, its_start, its_end = free[at]
            if its_start == end and its_slab == slab:
                end = its_end
                del free[at]
        if at:
            its_slab, its_start, its_end = free[at - 1]
            if its_end == start and its_slab == slab:
                free[at - 1] = _extent((slab, its_start, end))
                return
        free.insert(at, _extent((slab, start, end)))

    def forget(self, size: int) -> None:
        """Note that a refused tensor is freed."""
        self._refused -= aligned(size)

    def fit(self, size: int) -> None:
        """Make room for `size` bytes within the limit, between steps; blocks in use do not move.

        If nothing is in use, the memory becomes one slab of that size, unless a captured graph has the addresses.
        """
        size = min(aligned(size), self.limit - self.limit % ALIGNMENT)
        if not self.used and not self.fixed and (size > self.size or self.size > 1.03 * size):
            if self._slabs and self.device.type == "cuda":
                torch.cuda.synchronize(
                    self.device
                )  # copies that were ordered but not waited for may still run
            self._free, self._slabs = [], []
            self._blocks.clear()
            self._rows.clear()
        if size > self.size:
            more = self._make_slab(size - self.size, self.device)
            self._free.append(Extent(len(self._slabs), 0, more.numel()))
            self._slabs.append(more)


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of blocks."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@lru_cache(4096)
def aligned_sum(sizes: tuple[int, ...]) -> int:
    """Bytes that blocks of these sizes take together."""
    return sum(map(aligned, sizes))


def _is_dense(form: Form) -> bool:
    """Whether the elements lie side by side, in whatever order of dimensions, and none twice."""
    expected = 1
    for stride, size in sorted(zip(form.stride, form.size)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
