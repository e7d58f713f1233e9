"""Copy between buffers and pages by a group's book: restore, and the host half of a stash.

What moves: each valid byte once in, once out; a restore also writes the fill over the rows that were not
valid. A refused group has no pages: its buffers are filled whole (with zeros where no fill was asked for), so
that index tensors read by the rest of an overflowing step stay in range.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from pagestash.kernels.backend import launch, tl, triton
from pagestash.kernels.pages.chunks import copy_chunk, fill_chunk, page_address
from pagestash.kernels.pages.grid import GROUP, Grid
from pagestash.kernels.pages.layout import (
    HEADER,
    HOST_BASE,
    K_BYTES,
    K_GRANTED,
    K_HEADER,
    K_HOST_BASE,
    K_STATUS,
    Header,
    PoolMemory,
    Span,
    Status,
    chunk_bytes,
)

Tiers = Literal["both", "device", "host"]
_TIER_CODE: dict[Tiers, int] = {"both": 0, "device": 1, "host": 2}

ALONE = Grid(chunk=4096, warps=4, programs_per_sm=128)
"""For one tensor whose tail is left as it is; filling a tail is faster with larger chunks."""
FUSED = 8
"""Tensors that one launch copies; the kernel is unrolled over them."""
HOST_CHUNK = 32768
HOST_PROGRAMS = 8
HOST_WARPS = 16
"""Blocks that move host pages beside compute: eight saturate PCIe Gen5, and leave 124 of 132 SMs alone."""


def copy_to_pages(
    memory: PoolMemory,
    buffers: Sequence[torch.Tensor],
    spans: Sequence[Span],
    members: Sequence[int],
    book: torch.Tensor,
    *,
    tiers: Tiers = "both",
) -> None:
    """Copy the valid bytes of `buffers` (uint8, flat) to the pages that the book names for `members`."""
    if memory.backend == "torch":
        copy_reference(memory, buffers, spans, members, book, to_pages=True, tiers=tiers)
    else:
        _launch(memory, buffers, spans, members, book, [None] * len(spans), to_pages=True, tiers=tiers)


def copy_from_pages(
    memory: PoolMemory,
    buffers: Sequence[torch.Tensor],
    spans: Sequence[Span],
    members: Sequence[int],
    book: torch.Tensor,
    patterns: Sequence[int | None],
    *,
    tiers: Tiers = "both",
    unless: torch.Tensor | None = None,
) -> None:
    """Copy the pages of `members` back, and fill the rest of each buffer with its 8-byte pattern.

    A pattern of None leaves the tail as it is. With `tiers="host"` nothing is filled: the other half does it.
    Where `unless`, the status of another tensor's pages, says that they were granted, nothing is written at all.
    """
    if memory.backend == "triton":
        _launch(memory, buffers, spans, members, book, patterns, to_pages=False, tiers=tiers, unless=unless)
    elif unless is None or int(unless) != Status.GRANTED:
        copy_reference(memory, buffers, spans, members, book, to_pages=False, tiers=tiers, patterns=patterns)


# --- what: the torch reference ------------------------------------------------------------------------------


def copy_reference(
    memory: PoolMemory,
    buffers: Sequence[torch.Tensor],
    spans: Sequence[Span],
    members: Sequence[int],
    book: torch.Tensor,
    *,
    to_pages: bool,
    tiers: Tiers,
    patterns: Sequence[int | None] | None = None,
) -> None:
    page_bytes = memory.page_bytes
    for which, (buffer, span, member) in enumerate(zip(buffers, spans, members)):
        header = book[member * HEADER : (member + 1) * HEADER].tolist()
        granted = header[Header.STATUS] == Status.GRANTED
        length = header[Header.BYTES] if granted else 0
        pages = header[Header.PAGES] if granted else 0
        for slot, page in enumerate(book[span.table : span.table + pages].tolist()):
            on_host = page >= HOST_BASE
            if tiers == ("device" if on_host else "host"):
                continue
            slab = memory.host_slab if on_host else memory.device_slab
            first = (page - HOST_BASE if on_host else page) * page_bytes
            count = min(page_bytes, length - slot * page_bytes)
            in_page = slab[first : first + count]
            in_buffer = buffer[slot * page_bytes : slot * page_bytes + count]
            if to_pages:
                in_page.copy_(in_buffer)
            else:
                in_buffer.copy_(in_page)
        if not to_pages and tiers != "host":
            pattern = patterns[which] if patterns is not None else None
            if pattern is None and not granted:
                pattern = 0
            if pattern is not None:
                at = torch.arange(length, buffer.numel(), device=buffer.device) % 8
                octets = torch.tensor([pattern], dtype=torch.int64).view(torch.uint8).to(buffer.device)
                buffer[length:] = octets[at]


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(
    buffers,
    max_bytes,
    tables,
    members,
    patterns,
    book,
    unless,
    device_slab,
    host_slab,
    N: tl.constexpr,
    TO_PAGES: tl.constexpr,
    UNLESS: tl.constexpr,
    TIERS: tl.constexpr,  # 0 both, 1 device, 2 host
    FILL: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    first_chunk = tl.zeros((), tl.int64)
    for i in tl.static_range(N):
        header = book + members[i] * K_HEADER
        granted = tl.load(header + K_STATUS) == K_GRANTED
        length = tl.where(granted, tl.load(header + K_BYTES), 0)
        end = length
        if not TO_PAGES:
            if TIERS != 2:
                if FILL:
                    end = tl.cast(max_bytes[i], tl.int64)
                else:
                    end = tl.where(granted, length, max_bytes[i])
        if UNLESS:
            unneeded = tl.load(unless) == K_GRANTED
            length = tl.where(unneeded, 0, length)
            end = tl.where(unneeded, 0, end)
        chunks = (end + CHUNK - 1) // CHUNK
        chunk = program - first_chunk % programs
        chunk = tl.where(chunk < 0, chunk + programs, chunk)
        table = book + tables[i]
        # By the table's size, not by the pages in use: so the look-up does not wait for the header, a microsecond.
        page = tl.load(table + chunk * CHUNK // PAGE, mask=chunk * CHUNK < max_bytes[i], other=0)
        while chunk < chunks:
            # The page after this one is looked up while this one is copied.
            later = (chunk + programs) * CHUNK
            after = tl.load(table + later // PAGE, mask=later < max_bytes[i], other=0)
            offset = chunk * CHUNK
            buffer = buffers[i] + offset
            if offset < length:
                mine = TIERS == 0
                if TIERS == 1:
                    mine = page < K_HOST_BASE
                elif TIERS == 2:
                    mine = page >= K_HOST_BASE
                if mine:
                    address = page_address(page, device_slab, host_slab, PAGE) + offset % PAGE
                    if TO_PAGES:
                        copy_chunk(address, buffer, length - offset, CHUNK, WIDE)
                    else:
                        copy_chunk(buffer, address, length - offset, CHUNK, WIDE)
            if not TO_PAGES:
                if TIERS != 2:
                    if length - offset < CHUNK:
                        pattern = tl.cast(patterns[i], tl.int64)
                        fill_chunk(buffer, length - offset, pattern, end - offset, CHUNK, WIDE)
            page = after
            chunk += programs
        first_chunk += chunks


def _launch(
    memory: PoolMemory,
    buffers: Sequence[torch.Tensor],
    spans: Sequence[Span],
    members: Sequence[int],
    book: torch.Tensor,
    patterns: Sequence[int | None],
    to_pages: bool,
    tiers: Tiers,
    unless: torch.Tensor | None = None,
) -> None:
    fill = any(pattern is not None for pattern in patterns)
    # Few programs where host pages may be copied: PCIe needs no more, and many were not measured.
    device_only = tiers == "device" or not memory.host_pages
    grid = ALONE if len(spans) == 1 and not fill and device_only else GROUP
    chunk = chunk_bytes(memory.page_bytes, HOST_CHUNK if tiers == "host" else grid.chunk)
    for start in range(0, len(spans), FUSED):
        part = slice(start, start + FUSED)
        work = sum(-(-span.max_bytes // chunk) for span in spans[part])
        programs = grid.programs(work, memory.state.device)
        launch(
            _copy_kernel,
            (min(programs, HOST_PROGRAMS) if tiers == "host" else programs,),
            memory.state.device,
            tuple(buffers[part]),
            tuple(span.max_bytes for span in spans[part]),
            tuple(span.table for span in spans[part]),
            tuple(members[part]),
            tuple(pattern or 0 for pattern in patterns[part]),
            book,
            book if unless is None else unless,
            memory.device_slab,
            memory.host_slab if memory.host_pages else memory.device_slab,
            N=len(spans[part]),
            TO_PAGES=to_pages,
            UNLESS=unless is not None,
            TIERS=_TIER_CODE[tiers],
            FILL=fill,
            PAGE=memory.page_bytes,
            CHUNK=chunk,
            WIDE=all(buffer.data_ptr() % 16 == 0 for buffer in buffers[part]),
            num_warps=HOST_WARPS if tiers == "host" else grid.warps,
        )
