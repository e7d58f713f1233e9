"""Tickets: the handles of stashed tensors, and the groups they were reserved in."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagestash.kernels.pages.layout import HEADER, Span


@dataclass(slots=True, eq=False)
class TicketGroup:
    """Tensors that were reserved together: their book on the device, and their layout."""

    pool_id: int
    book: torch.Tensor
    spans: tuple[Span, ...]
    account: int


@dataclass(slots=True, eq=False)
class Ticket:
    """One stashed tensor; pass it to the pool to restore or release it."""

    group: TicketGroup = field(repr=False)
    member: int
    shape: torch.Size
    dtype: torch.dtype
    released: bool = False
    most_pages: int = 0
    """The most pages that it can hold, as far as the host knows."""

    @property
    def span(self) -> Span:
        return self.group.spans[self.member]


TABLE_ALIGN = 16
"""Page tables start at multiples of this many words. Triton compiles a kernel anew for each pattern of arguments
that are multiples of 16 or not, and a group of eight takes seconds to compile."""


def lay_out(tensors: Sequence[torch.Tensor], page_bytes: int) -> tuple[tuple[Span, ...], int]:
    """Each tensor's span, and the length of the book that holds all page tables."""
    spans, position = [], _aligned(HEADER * len(tensors))
    for tensor in tensors:
        capacity = tensor.shape[0] if tensor.ndim else 1
        row_bytes = tensor.nbytes // capacity if capacity else 0
        spans.append(Span(row_bytes, capacity, position))
        position += _aligned(-(-tensor.nbytes // page_bytes))
    return tuple(spans), position


def _aligned(words: int) -> int:
    return -(-words // TABLE_ALIGN) * TABLE_ALIGN
