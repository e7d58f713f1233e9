"""Pinned host memory for tensors of all sizes: extents of slabs, split and joined."""

from bisect import insort
from dataclasses import dataclass

import torch

from pagestash.pages.host import host_slab

ALIGNMENT = 512
PIECE = 1 << 20
"""If no free extent is large enough, a tensor is spread over several of at least this size. Smaller copies use
the link badly."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start` to `end` of one slab."""

    slab: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Host memory for one tensor, usually in one piece."""

    pieces: tuple[torch.Tensor, ...]
    extents: tuple[Extent, ...]

    @property
    def size(self) -> int:
        return sum(extent.size for extent in self.extents)


class HostSlabs:
    """Allocates host memory; the caller orders the copies into and out of it.

    A tensor that does not fit is refused and counted: `wanted` is the size that would have sufficed.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self.used = 0
        self.wanted = 0
        """Peak of bytes used plus bytes refused."""
        self.fixed = False
        """Whether slabs must never move: a captured CUDA graph has their addresses."""
        self._refused = 0
        self._slabs: list[torch.Tensor] = []
        self._free: list[Extent] = []  # by slab and start

    @property
    def size(self) -> int:
        """Bytes of host memory, pinned if the device is a GPU."""
        return sum(slab.numel() for slab in self._slabs)

    def take(self, size: int) -> HostBlock | None:
        """A block of at least `size` bytes, or None without room; `forget` it when the refused tensor is freed."""
        size = aligned(size)
        self.wanted = max(self.wanted, self.used + self._refused + size)
        chosen = self._choose(size)
        if not chosen:
            self._refused += size
            return None
        extents = []
        for extent in chosen:
            part = min(extent.size, size)
            size -= part
            extents.append(Extent(extent.slab, extent.start, extent.start + part))
            self._free[self._free.index(extent)] = Extent(extent.slab, extent.start + part, extent.end)
        self._free = [extent for extent in self._free if extent.size]
        self.used += sum(extent.size for extent in extents)
        pieces = tuple(self._slabs[extent.slab][extent.start : extent.end] for extent in extents)
        return HostBlock(pieces, tuple(extents))

    def _choose(self, size: int) -> list[Extent]:
        """The smallest free extent that is large enough, else the fewest largest ones that together are."""
        fitting = [extent for extent in self._free if extent.size >= size]
        if fitting:
            return [min(fitting, key=lambda extent: extent.size)]
        chosen: list[Extent] = []
        for extent in sorted(self._free, key=lambda extent: -extent.size):
            if extent.size < min(PIECE, size):
                break
            chosen.append(extent)
            size -= extent.size
            if size <= 0:
                return chosen
        return []

    def give(self, block: HostBlock) -> None:
        """Return a block: the next `take` may get its memory."""
        for extent in block.extents:
            insort(self._free, extent, key=lambda free: (free.slab, free.start))
        self.used -= block.size
        joined: list[Extent] = []
        for extent in self._free:
            last = joined[-1] if joined else None
            if last is not None and last.slab == extent.slab and last.end == extent.start:
                joined[-1] = Extent(last.slab, last.start, extent.end)
            else:
                joined.append(extent)
        self._free = joined

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
        if size > self.size:
            more = host_slab(size - self.size, self.device)
            self._free.append(Extent(len(self._slabs), 0, more.numel()))
            self._slabs.append(more)


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of blocks."""
    return -(-size // ALIGNMENT) * ALIGNMENT
