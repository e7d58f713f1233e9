"""Pinned host memory: each group of tensors that leaves has one extent of a slab."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pagestash.pages.host import MakeSlab, host_slab

ALIGNMENT = 512
_MOST_EXTENTS, _MOST_FORMS = 4096, 256
"""Steady steps take the same extents in the same forms. So many are cached: making one costs more than all else."""
_COPIED_AS_THEY_ARE = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)
)
"""Of these dtypes `copy_` copies bits, on every device."""

Span = tuple[int, int, int]
"""A slab, and the first byte and the end of a part of it."""


class Form(Protocol):
    """How a tensor looks at its bytes. Hashable."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def size(self) -> torch.Size: ...
    @property
    def stride(self) -> tuple[int, ...]: ...


class HostExtent(NamedTuple):
    """Host memory for one group of tensors."""

    memory: torch.Tensor
    span: Span
    forms: dict[tuple[int, Form], torch.Tensor | None]
    """What `in_form` has made."""

    def in_form(self, at: int, form: Form) -> torch.Tensor | None:
        """The memory from byte `at` on as a tensor of this form.

        None if the form's elements are not all the bytes of its range, each once.
        """
        try:
            return self.forms[at, form]
        except KeyError:
            pass
        made = None
        if form.dtype in _COPIED_AS_THEY_ARE and _is_dense(form):
            size = form.size.numel() * form.dtype.itemsize
            made = self.memory[at : at + size].view(form.dtype).as_strided(form.size, form.stride)
        if len(self.forms) >= _MOST_FORMS:
            self.forms.clear()
        self.forms[at, form] = made
        return made


class HostSlabs:
    """Allocates host memory; the caller orders the copies into and out of it.

    A group that does not fit is refused and counted: `wanted` is the size that would have sufficed.
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
        self._free: list[Span] = []  # by slab and start
        self._extents: dict[Span, HostExtent] = {}
        """In use or not."""

    @property
    def size(self) -> int:
        """Bytes of host memory, pinned if the device is a GPU."""
        return sum(slab.numel() for slab in self._slabs)

    def take(self, size: int) -> HostExtent | None:
        """An extent of `size` bytes, or None without room; `forget` it when what was refused is freed."""
        size = aligned(size)
        self.wanted = max(self.wanted, self.used + self._refused + size)
        fitting = [(end - start, at) for at, (_, start, end) in enumerate(self._free) if end - start >= size]
        if not fitting:
            self._refused += size
            return None
        room, at = min(fitting)
        slab, start, end = self._free[at]
        self.used += size
        if room == size:
            del self._free[at]
        else:
            self._free[at] = slab, start + size, end
        span = slab, start, start + size
        extent = self._extents.get(span)
        if extent is None:
            if len(self._extents) >= _MOST_EXTENTS:
                self._extents.clear()
            extent = self._extents[span] = HostExtent(self._slabs[slab][start : start + size], span, {})
        return extent

    def give(self, extent: HostExtent) -> None:
        """Return it: the next `take` may get its memory."""
        slab, start, end = extent.span
        free = self._free
        self.used -= end - start
        at = bisect_left(free, extent.span)
        if at < len(free) and free[at][:2] == (slab, end):
            end = free.pop(at)[2]
        if at and (free[at - 1][0], free[at - 1][2]) == (slab, start):
            start = free.pop(at - 1)[1]
        insort(free, (slab, start, end))

    def forget(self, size: int) -> None:
        """Note that what was refused is freed."""
        self._refused -= aligned(size)

    def fit(self, size: int) -> None:
        """Make room for `size` bytes within the limit, between steps; extents in use do not move.

        If nothing is in use, the memory becomes one slab of that size, unless a captured graph has the addresses.
        """
        size = min(aligned(size), self.limit - self.limit % ALIGNMENT)
        if not self.used and not self.fixed and (size > self.size or self.size > 1.03 * size):
            if self._slabs and self.device.type == "cuda":
                # Copies that were ordered but not waited for may still run.
                torch.cuda.synchronize(self.device)
            self._free, self._slabs = [], []
            self._extents.clear()
        if size > self.size:
            more = self._make_slab(size - self.size, self.device)
            self._free.append((len(self._slabs), 0, more.numel()))
            self._slabs.append(more)


def ordinary_extent(size: int) -> HostExtent:
    """Memory of no slab, for a step that shows how large slabs should be."""
    return HostExtent(torch.empty(size, dtype=torch.uint8, device="cpu"), (-1, 0, size), {})


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of host memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin in one extent, and its size."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += aligned(size)
    return starts, at


def _is_dense(form: Form) -> bool:
    """Whether the elements lie side by side, in whatever order of dimensions, and none twice."""
    expected = 1
    for stride, size in sorted(zip(form.stride, form.size)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
