"""Give the pages of tickets back to the rings of free ids.

What moves: eight bytes a page read, four written. Releasing a ticket that holds nothing changes nothing, so a
replayed graph may release what an earlier replay already did.
"""

from collections.abc import Sequence

import torch

from pagestash.kernels.backend import launch, tl, triton
from pagestash.kernels.pages.layout import (
    HEADER,
    K_BYTES,
    K_DEVICE_FREE,
    K_DEVICE_HEAD,
    K_DEVICE_PAGES,
    K_EMPTY,
    K_GRANTED,
    K_HEADER,
    K_HELD,
    K_HOST_FREE,
    K_HOST_HEAD,
    K_PAGES,
    K_REQUIRED,
    K_REQUIRED_PAGES,
    K_STATUS,
    K_WANTED,
    Counter,
    Header,
    PoolMemory,
    Span,
    Status,
)

BLOCK = 1024
FUSED = 8
"""Tensors that one launch releases; the kernel is unrolled over them."""


def release(
    memory: PoolMemory, spans: Sequence[Span], members: Sequence[int], book: torch.Tensor, account: int
) -> None:
    """Append the pages of `members` to the rings; a refused ticket only stops being counted as wanted."""
    if memory.backend == "torch":
        release_reference(memory, spans, members, book, account)
        return
    for start in range(0, len(spans), FUSED):
        part = slice(start, start + FUSED)
        # One program: the appends of one release must follow each other, and 1,024 pages take 2.6 µs.
        launch(
            _release_kernel,
            (1,),
            memory.state.device,
            tuple(span.table for span in spans[part]),
            tuple(members[part]),
            book,
            memory.state,
            memory.accounts,
            account,
            memory.device_ring,
            memory.host_ring,
            memory.device_pages,
            memory.host_pages,
            N=len(spans[part]),
            BLOCK=BLOCK,
            num_warps=8,
        )


# --- what: the torch reference ------------------------------------------------------------------------------


def release_reference(
    memory: PoolMemory, spans: Sequence[Span], members: Sequence[int], book: torch.Tensor, account: int
) -> None:
    state = memory.state
    tiers = (
        (memory.device_ring, Counter.DEVICE_HEAD, Counter.DEVICE_FREE),
        (memory.host_ring, Counter.HOST_HEAD, Counter.HOST_FREE),
    )
    for span, member in zip(spans, members):
        header = book[member * HEADER : (member + 1) * HEADER]
        status, pages = int(header[Header.STATUS]), int(header[Header.PAGES])
        if status == Status.EMPTY:
            continue
        state[Counter.WANTED] -= pages
        state[Counter.REQUIRED] -= header[Header.REQUIRED]
        state[Counter.BYTES] -= header[Header.BYTES]
        memory.accounts[account, 0] -= header[Header.BYTES]
        if status == Status.GRANTED:
            on_device = int(header[Header.DEVICE_PAGES])
            ids = book[span.table : span.table + pages].to(torch.int32)
            for (ring, head, free), part in zip(tiers, (ids[:on_device], ids[on_device:])):
                end = int(state[head]) + int(state[free])
                at = (torch.arange(len(part)) + end) % max(ring.numel(), 1)
                ring[at] = part
                state[free] += len(part)
        header[Header.STATUS] = Status.EMPTY


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _append(ring, length, head, free, table, count, BLOCK: tl.constexpr):
    start = tl.zeros((), tl.int64)
    while start < count:
        at = start + tl.arange(0, BLOCK)
        pages = tl.load(table + at, mask=at < count, other=0)
        # head < length, free + at <= length: at most two lengths, so one subtraction wraps.
        slot = head + free + at
        slot = tl.where(slot >= length, slot - length, slot)
        tl.store(ring + slot, pages.to(tl.int32), mask=at < count)
        start += BLOCK


@triton.jit(do_not_specialize=["account", "device_pages", "host_pages"])
def _release_kernel(
    tables,
    members,
    book,
    state,
    accounts,
    account,
    device_ring,
    host_ring,
    device_pages,
    host_pages,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    device_head = tl.load(state + K_DEVICE_HEAD)
    device_free = tl.load(state + K_DEVICE_FREE)
    host_head = tl.load(state + K_HOST_HEAD)
    host_free = tl.load(state + K_HOST_FREE)
    wanted = tl.load(state + K_WANTED)
    required = tl.load(state + K_REQUIRED)
    given_up = tl.zeros((), tl.int64)
    for i in tl.static_range(N):
        header = book + members[i] * K_HEADER
        status = tl.load(header + K_STATUS)
        pages = tl.where(status != K_EMPTY, tl.load(header + K_PAGES), 0)
        given_up += tl.where(status != K_EMPTY, tl.load(header + K_BYTES), 0)
        wanted -= pages
        required -= tl.where(status != K_EMPTY, tl.load(header + K_REQUIRED_PAGES), 0)
        on_device = tl.where(status == K_GRANTED, tl.load(header + K_DEVICE_PAGES), 0)
        on_host = tl.where(status == K_GRANTED, pages, 0) - on_device
        table = book + tables[i]
        _append(device_ring, device_pages, device_head, device_free, table, on_device, BLOCK)
        _append(host_ring, host_pages, host_head, host_free, table + on_device, on_host, BLOCK)
        device_free += on_device
        host_free += on_host
    held = tl.load(state + K_HELD) - given_up
    held_there = tl.load(accounts + account * 2) - given_up
    tl.debug_barrier()  # every warp has read what is now overwritten
    for i in tl.static_range(N):
        tl.store(book + members[i] * K_HEADER + K_STATUS, tl.zeros((), tl.int64) + K_EMPTY)
    tl.store(state + K_DEVICE_FREE, device_free)
    tl.store(state + K_HOST_FREE, host_free)
    tl.store(state + K_WANTED, wanted)
    tl.store(state + K_REQUIRED, required)
    tl.store(state + K_HELD, held)
    tl.store(accounts + account * 2, held_there)
