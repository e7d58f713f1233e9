"""Reserve pages for a group, and in the same launch copy its valid rows into them.

What moves: each valid byte is read once and written once. The reservation is part of the copy so that a group
costs one launch; a kernel of its own would be a second, in series with a copy that takes 35 µs for 64 MiB.

Every program reads the same counters and comes to the same grant by itself, so no grid-wide barrier is needed.
The last program, which often has a chunk less to copy, keeps the books: when all have read the counters it writes
the new ones. (A program of its own for that would cost 5 %: the device no longer spreads the others evenly.)
"""

from collections.abc import Sequence

import torch

from pagestash.kernels.backend import launch, tl, triton
from pagestash.kernels.pages.chunks import copy_chunk, page_address
from pagestash.kernels.pages.copy import Tiers, copy_reference
from pagestash.kernels.pages.grid import GROUP, Grid
from pagestash.kernels.pages.layout import (
    K_ARRIVED,
    K_BYTES,
    K_DEVICE_FREE,
    K_DEVICE_HEAD,
    K_DEVICE_PAGES,
    K_DEVICE_PEAK,
    K_GIVEN_UP,
    K_GRANTED,
    K_HEADER,
    K_HELD,
    K_HELD_PEAK,
    K_HOST_BASE,
    K_HOST_FREE,
    K_HOST_HEAD,
    K_HOST_PEAK,
    K_PAGES,
    K_REFUSED,
    K_REFUSED_GROUPS,
    K_REQUIRED,
    K_REQUIRED_PAGES,
    K_REQUIRED_PEAK,
    K_SPILLED,
    K_STATUS,
    K_WANTED,
    K_WANTED_PEAK,
    PoolMemory,
    Span,
    chunk_bytes,
)
from pagestash.kernels.pages.reserve import reserve_reference

ALONE = Grid(chunk=16384, warps=16, programs_per_sm=16, chunks=2)
"""For one tensor; with a chunk less for each program, reading the counters takes longer than copying (0.88)."""
FUSED = 8
"""Tensors that one launch copies; the kernel is unrolled over them."""


def reserve(
    memory: PoolMemory,
    spans: Sequence[Span],
    fixed_rows: Sequence[int],
    rows: torch.Tensor | None,
    book: torch.Tensor,
    account: int,
    *,
    expendable: bool = False,
) -> None:
    """Take pages for the valid rows of a group, all or none, and write its book; copy nothing.

    `fixed_rows[i]` is tensor i's number of valid rows, or -1 where the device integer `rows` says it. An
    expendable group can be recomputed: it takes device pages only, and only those that the others, at the most
    they ever wanted, would leave; without them it is given up, which is no overflow.
    """
    if memory.backend == "torch":
        reserve_reference(memory, spans, fixed_rows, rows, book, account, expendable=expendable)
    else:
        _launch(memory, (), spans, fixed_rows, rows, book, account, copy=0, expendable=expendable)


def stash(
    memory: PoolMemory,
    sources: Sequence[torch.Tensor],
    spans: Sequence[Span],
    fixed_rows: Sequence[int],
    rows: torch.Tensor | None,
    book: torch.Tensor,
    account: int,
    *,
    host_later: bool = False,
) -> None:
    """`reserve`, then copy `sources` (uint8, flat) into the pages: one launch for up to `FUSED` tensors.

    With `host_later` the bytes of host pages are left to a `copy_to_pages` of the caller's.
    """
    if memory.backend == "torch":
        reserve_reference(memory, spans, fixed_rows, rows, book, account)
        tiers: Tiers = "device" if host_later else "both"
        copy_reference(memory, sources, spans, range(len(spans)), book, to_pages=True, tiers=tiers)
    else:
        _launch(memory, sources, spans, fixed_rows, rows, book, account, copy=1 if host_later else 2)


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _valid_bytes(count, fixed, capacity, row_bytes):
    rows = tl.where(fixed >= 0, fixed, tl.minimum(tl.maximum(count, 0), capacity))
    return rows.to(tl.int64) * row_bytes


@triton.jit
def _wrap(position, length):
    return tl.where(position >= length, position - length, position)


@triton.jit
def _ring_page(
    chunk,
    chunks,
    device_ring,
    device_at,
    device_pages,
    host_ring,
    host_at,
    host_pages,
    left,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The page of a tensor's chunk: from the device ring for its first `left` slots, else from the host's."""
    slot = chunk * CHUNK // PAGE
    # The address is chosen, not the value: one load, and nobody waits for it here.
    device_entry = device_ring + _wrap(device_at + slot, device_pages)
    host_entry = host_ring + _wrap(host_at + slot, host_pages)
    return tl.load(tl.where(slot < left, device_entry, host_entry), mask=chunk < chunks, other=0)


@triton.jit(do_not_specialize=["account", "device_pages", "host_pages"])
def _stash_kernel(
    sources,
    row_bytes,
    capacities,
    fixed_rows,
    tables,
    rows,
    book,
    state,
    accounts,
    account,
    overflow,
    device_ring,
    host_ring,
    device_slab,
    host_slab,
    device_pages,
    host_pages,
    N: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    EXPENDABLE: tl.constexpr,
    COPY: tl.constexpr,  # 0 nothing, 1 device pages only, 2 every page
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    count = tl.zeros((), tl.int64)
    if ROWS_ON_DEVICE:
        count = tl.load(rows).to(tl.int64)
    wanted = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    for i in tl.static_range(N):
        length = _valid_bytes(count, fixed_rows[i], capacities[i], row_bytes[i])
        wanted += (length + PAGE - 1) // PAGE
        total += length
    device_head = tl.load(state + K_DEVICE_HEAD)
    device_free = tl.load(state + K_DEVICE_FREE)
    host_head = tl.load(state + K_HOST_HEAD)
    host_free = tl.load(state + K_HOST_FREE)
    on_device = tl.minimum(wanted, device_free)
    on_host = wanted - on_device
    granted = on_host <= host_free
    if EXPENDABLE:
        held_back = tl.maximum(tl.load(state + K_REQUIRED_PEAK) - tl.load(state + K_REQUIRED), 0)
        granted = wanted <= device_free - held_back
    # All warps have read the counters when the barrier lets the arrival through. Nobody waits for its answer.
    tl.debug_barrier()
    tl.atomic_add(state + K_ARRIVED, 1, sem="relaxed")

    first_page = tl.zeros((), tl.int64)
    first_chunk = tl.zeros((), tl.int64)
    for i in tl.static_range(N):
        length = _valid_bytes(count, fixed_rows[i], capacities[i], row_bytes[i])
        pages = (length + PAGE - 1) // PAGE
        if program == programs - 1:
            header = book + i * K_HEADER
            ours = tl.minimum(tl.maximum(on_device - first_page, 0), pages)
            tl.store(header + K_PAGES, pages)
            tl.store(header + K_DEVICE_PAGES, tl.where(granted, ours, 0))
            tl.store(header + K_BYTES, length)
            tl.store(header + K_STATUS, tl.where(granted, K_GRANTED, K_REFUSED).to(tl.int64))
            tl.store(header + K_REQUIRED_PAGES, 0 if EXPENDABLE else pages)
        if granted:
            chunks = (length + CHUNK - 1) // CHUNK
            # Each tensor starts at the program where the one before it stopped, so that a group of small
            # tensors still fills the device.
            chunk = program - first_chunk % programs
            chunk = tl.where(chunk < 0, chunk + programs, chunk)
            device_at, host_at = device_head + first_page, host_head + first_page - on_device
            left = on_device - first_page  # this tensor's slots below it are on the device
            page = _ring_page(
                chunk,
                chunks,
                device_ring,
                device_at,
                device_pages,
                host_ring,
                host_at,
                host_pages,
                left,
                PAGE,
                CHUNK,
            )
            while chunk < chunks:
                # The page after this one is looked up while this one is copied.
                after = _ring_page(
                    chunk + programs,
                    chunks,
                    device_ring,
                    device_at,
                    device_pages,
                    host_ring,
                    host_at,
                    host_pages,
                    left,
                    PAGE,
                    CHUNK,
                )
                offset = chunk * CHUNK
                within = offset % PAGE
                # The source's bytes are asked for before the page's number is used: both are under way at once.
                # Conditions on COPY stand alone: without sources (COPY = 0) nothing here may be compiled.
                if COPY == 2:
                    address = page_address(page, device_slab, host_slab, PAGE) + within
                    copy_chunk(address, sources[i] + offset, length - offset, CHUNK, WIDE)
                elif COPY == 1:
                    if page < K_HOST_BASE:
                        address = device_slab + page.to(tl.int64) * PAGE + within
                        copy_chunk(address, sources[i] + offset, length - offset, CHUNK, WIDE)
                if within == 0:
                    tl.store(book + tables[i] + offset // PAGE, page.to(tl.int64))
                page = after
                chunk += programs
            first_chunk += chunks
        first_page += pages

    if program == programs - 1:
        # All loads before the first store: in order, each store would wait for the load before it.
        own = accounts + account * 2
        spilled = tl.load(state + K_SPILLED)
        refused = tl.load(state + K_REFUSED_GROUPS)
        device_peak = tl.load(state + K_DEVICE_PEAK)
        host_peak = tl.load(state + K_HOST_PEAK)
        wanted_now = tl.load(state + K_WANTED) + wanted
        wanted_peak = tl.load(state + K_WANTED_PEAK)
        required_now = tl.load(state + K_REQUIRED)
        required_peak = tl.load(state + K_REQUIRED_PEAK)
        given_up = tl.load(state + K_GIVEN_UP)
        if not EXPENDABLE:
            required_now += wanted
        held_now = tl.load(state + K_HELD) + total
        held_peak = tl.load(state + K_HELD_PEAK)
        own_now = tl.load(own) + total
        own_peak = tl.load(own + 1)
        # By now all the others have begun, or will: they wait for nothing.
        while tl.atomic_add(state + K_ARRIVED, 0, sem="relaxed") < programs:
            pass
        tl.store(state + K_ARRIVED, tl.zeros((), tl.int64))
        if granted:
            device_used = device_pages - device_free + on_device
            host_used = host_pages - host_free + on_host
            tl.store(state + K_DEVICE_HEAD, _wrap(device_head + on_device, device_pages))
            tl.store(state + K_HOST_HEAD, _wrap(host_head + on_host, host_pages))
            tl.store(state + K_DEVICE_FREE, device_free - on_device)
            tl.store(state + K_HOST_FREE, host_free - on_host)
            tl.store(state + K_SPILLED, spilled + on_host)
            tl.store(state + K_DEVICE_PEAK, tl.maximum(device_peak, device_used))
            tl.store(state + K_HOST_PEAK, tl.maximum(host_peak, host_used))
        elif EXPENDABLE:
            tl.store(state + K_GIVEN_UP, given_up + 1)
        else:
            tl.store(overflow, 1.0)
            tl.store(state + K_REFUSED_GROUPS, refused + 1)
        tl.store(state + K_REQUIRED, required_now)
        tl.store(state + K_REQUIRED_PEAK, tl.maximum(required_peak, required_now))
        tl.store(state + K_WANTED, wanted_now)
        tl.store(state + K_WANTED_PEAK, tl.maximum(wanted_peak, wanted_now))
        tl.store(state + K_HELD, held_now)
        tl.store(state + K_HELD_PEAK, tl.maximum(held_peak, held_now))
        tl.store(own, own_now)
        tl.store(own + 1, tl.maximum(own_peak, own_now))


def _launch(
    memory: PoolMemory,
    sources: Sequence[torch.Tensor],
    spans: Sequence[Span],
    fixed_rows: Sequence[int],
    rows: torch.Tensor | None,
    book: torch.Tensor,
    account: int,
    copy: int,
    expendable: bool = False,
) -> None:
    # Few programs where host pages may be written: PCIe needs no more, and many were not measured.
    device_only = copy == 1 or not memory.host_pages
    grid = ALONE if copy and len(spans) == 1 and device_only else GROUP
    # Without a copy the unit of work is the page: one table entry.
    chunk = chunk_bytes(memory.page_bytes, grid.chunk if copy else memory.page_bytes)
    work = sum(-(-span.max_bytes // chunk) for span in spans)
    launch(
        _stash_kernel,
        (grid.programs(work, memory.state.device),),
        memory.state.device,
        tuple(sources),
        tuple(span.row_bytes for span in spans),
        tuple(span.capacity for span in spans),
        tuple(fixed_rows),
        tuple(span.table for span in spans),
        memory.state if rows is None else rows,
        book,
        memory.state,
        memory.accounts,
        account,
        memory.overflow,
        memory.device_ring,
        memory.host_ring,
        memory.device_slab,
        memory.host_slab if memory.host_pages else memory.device_slab,
        memory.device_pages,
        memory.host_pages,
        N=len(spans),
        ROWS_ON_DEVICE=rows is not None,
        EXPENDABLE=expendable,
        COPY=copy,
        PAGE=memory.page_bytes,
        CHUNK=chunk,
        WIDE=all(source.data_ptr() % 16 == 0 for source in sources),
        num_warps=grid.warps,
    )
