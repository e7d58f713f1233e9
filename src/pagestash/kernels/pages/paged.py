"""Rows of a buffer addressed in its pages, for kernels that read or write a stashed tensor in place."""

from dataclasses import dataclass

import torch

from pagestash.kernels.backend import tl, triton
from pagestash.kernels.pages.chunks import page_address
from pagestash.kernels.pages.copy import copy_reference
from pagestash.kernels.pages.layout import HEADER, Header, PoolMemory, Span, Status


@dataclass(frozen=True, slots=True)
class Pages:
    """Where one tensor of a group is stashed, by the group's book."""

    memory: PoolMemory
    span: Span
    member: int
    book: torch.Tensor

    @property
    def status(self) -> torch.Tensor:
        """One word on the device, a `Status`."""
        return self.book[self.member * HEADER + Header.STATUS]

    @property
    def granted(self) -> torch.Tensor:
        """Whether there are pages at all: one bool on the device."""
        return self.status == Status.GRANTED


def page_bytes(pages: Pages | None) -> int | None:
    """The bytes of one of `pages`; None where there are none."""
    return None if pages is None else pages.memory.page_bytes


def widest_block(width: int, most: int, element_size: int, page: int | None) -> int:
    """Columns a tile may have: a power of two, no longer than a page, dividing the width if it can."""
    if page is not None:
        in_page = page // element_size
        most = min(most, in_page & -in_page)
    block = min(width & -width, most)
    if block < min(most, 64):
        block = min(most, 1 << (width - 1).bit_length())
    return block


def is_wide(width: int, block: int, element_size: int) -> bool:
    """Whether every block of every row starts at a multiple of 16 bytes."""
    return width * element_size % 16 == 0 and block * element_size % 16 == 0


def arguments(pages: Pages | None, other: torch.Tensor) -> tuple:
    """Book, member, table, device slab and host slab of `pages`; any pointers where there are none."""
    if pages is None:
        return other, 0, 0, other, other
    slab = pages.memory.device_slab
    host = pages.memory.host_slab if pages.memory.host_pages else slab
    return pages.book, pages.member, pages.span.table, slab, host


def copy_rows(pages: Pages, buffer: torch.Tensor, *, to_pages: bool) -> None:
    """Copy the valid rows between a contiguous buffer and its pages; nothing where none were granted.

    The specification of what kernels do in place; it waits for the device.
    """
    if bool(pages.granted):
        flat, spans = [buffer.view(-1).view(torch.uint8)], [pages.span]
        copy_reference(pages.memory, flat, spans, [pages.member], pages.book, to_pages=to_pages, tiers="both")


@triton.jit
def granted_bytes(
    book,
    member,
    HEADER: tl.constexpr = 5,
    STATUS: tl.constexpr = 3,
    BYTES: tl.constexpr = 2,
    GRANTED: tl.constexpr = 1,
):
    """Whether a tensor has pages, and its valid bytes.

    The numbers of the layout are defaults, not globals: Triton compares each global that a kernel reads at each
    launch, 1 µs. They are literals: Triton's cache on disk goes by the text of a function, not by the values of
    its defaults.
    """
    header = book + member * HEADER
    return tl.load(header + STATUS) == GRANTED, tl.load(header + BYTES)


@triton.jit
def page_pointers(
    held,
    first,
    column,
    inside,
    like,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    WITHIN: tl.constexpr = False,
):
    """Pointers to the elements `column` that follow byte `first` of each row.

    `held` is the tensor's book, table, length in bytes, and the two slabs.

    A block of columns is no longer than a page, so it lies in one page or in two; WITHIN says that it is one. WIDE
    says that `first` is a multiple of 16; page boundaries are too, so no 16-byte access straddles one.
    """
    book, table, length, device_slab, host_slab = held
    SIZE: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    slot = first // PAGE
    within = first - slot * PAGE
    one = tl.load(book + table + slot, mask=inside, other=0)
    device_base = device_slab.to(tl.int64)
    host_base = host_slab.to(tl.int64)
    one_at = page_address(one, device_base, host_base, PAGE) + within
    byte = (column * SIZE).to(tl.int64)[None, :]
    address = one_at[:, None] + byte
    if not WITHIN:
        two = tl.load(book + table + slot + 1, mask=inside & ((slot + 1) * PAGE < length), other=0)
        two_at = page_address(two, device_base, host_base, PAGE) + within - PAGE
        address = tl.where(within[:, None] + byte < PAGE, one_at[:, None], two_at[:, None]) + byte
    pointer = address.to(like.dtype)
    if WIDE:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16 // SIZE))
    return pointer
