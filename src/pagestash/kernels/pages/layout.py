"""The pool as its kernels see it: slabs of pages, rings of free ids, counters, and a group's book.

Page ids below `HOST_BASE` are device pages, the rest host pages; both ranges start at a fixed number, so
growing one tier renumbers nothing that is live. A tier's free ids stand in a ring: `HEAD` is the position of
the first, `FREE` their number, and a page given back goes behind the last. All positions are kept below the
ring's length, so no kernel divides.

A *book* is what a group leaves behind: int64, first `HEADER` words a tensor (pages wanted, how many of them
are device pages, valid bytes, status, pages counted as required), then each tensor's page table.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from pagestash.kernels.backend import Backend, tl

HOST_BASE = 1 << 30
HEADER = 5
ACCOUNTS = 4096
"""Regions whose bytes are told apart; 64 KiB of counters."""


class Counter(IntEnum):
    """Positions in the pool's int64 state."""

    DEVICE_HEAD = 0
    DEVICE_FREE = 1
    HOST_HEAD = 2
    HOST_FREE = 3
    DEVICE_PEAK = 4
    HOST_PEAK = 5
    WANTED = 6
    WANTED_PEAK = 7
    SPILLED = 8  # pages that went to the host since the last reset
    REFUSED = 9  # groups that did not fit since the last reset
    ARRIVED = 10  # programs of the running kernel that are done reading the state
    BYTES = 11  # valid bytes that tickets stand for, refused ones included
    BYTES_PEAK = 12
    REQUIRED = 13  # wanted pages of groups that are not expendable
    REQUIRED_PEAK = 14  # the most there ever were: what expendable groups leave free
    GIVEN_UP = 15  # expendable groups that got no pages since the last reset


class Header(IntEnum):
    """Positions in a tensor's header."""

    PAGES = 0
    DEVICE_PAGES = 1
    BYTES = 2
    STATUS = 3
    REQUIRED = 4  # the pages, or 0 for an expendable group


class Status(IntEnum):
    """What a ticket stands for on the device."""

    EMPTY = 0  # released
    GRANTED = 1
    REFUSED = 2  # counted as wanted, holds no pages


# The same numbers for Triton, which reads globals only when they are constexpr.
K_HOST_BASE = tl.constexpr(HOST_BASE)
K_HEADER = tl.constexpr(HEADER)
K_DEVICE_HEAD = tl.constexpr(int(Counter.DEVICE_HEAD))
K_DEVICE_FREE = tl.constexpr(int(Counter.DEVICE_FREE))
K_HOST_HEAD = tl.constexpr(int(Counter.HOST_HEAD))
K_HOST_FREE = tl.constexpr(int(Counter.HOST_FREE))
K_DEVICE_PEAK = tl.constexpr(int(Counter.DEVICE_PEAK))
K_HOST_PEAK = tl.constexpr(int(Counter.HOST_PEAK))
K_WANTED = tl.constexpr(int(Counter.WANTED))
K_WANTED_PEAK = tl.constexpr(int(Counter.WANTED_PEAK))
K_SPILLED = tl.constexpr(int(Counter.SPILLED))
K_REFUSED_GROUPS = tl.constexpr(int(Counter.REFUSED))
K_ARRIVED = tl.constexpr(int(Counter.ARRIVED))
K_HELD = tl.constexpr(int(Counter.BYTES))
K_HELD_PEAK = tl.constexpr(int(Counter.BYTES_PEAK))
K_REQUIRED = tl.constexpr(int(Counter.REQUIRED))
K_REQUIRED_PEAK = tl.constexpr(int(Counter.REQUIRED_PEAK))
K_GIVEN_UP = tl.constexpr(int(Counter.GIVEN_UP))
K_PAGES = tl.constexpr(int(Header.PAGES))
K_DEVICE_PAGES = tl.constexpr(int(Header.DEVICE_PAGES))
K_BYTES = tl.constexpr(int(Header.BYTES))
K_STATUS = tl.constexpr(int(Header.STATUS))
K_REQUIRED_PAGES = tl.constexpr(int(Header.REQUIRED))
K_EMPTY = tl.constexpr(int(Status.EMPTY))
K_GRANTED = tl.constexpr(int(Status.GRANTED))
K_REFUSED = tl.constexpr(int(Status.REFUSED))


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one tensor in a group: `capacity` rows of `row_bytes`, and where its page table starts."""

    row_bytes: int
    capacity: int
    table: int

    @property
    def max_bytes(self) -> int:
        return self.row_bytes * self.capacity


@dataclass(slots=True)
class PoolMemory:
    """Everything the kernels read and write; `grow` replaces slabs and rings, never the counters."""

    page_bytes: int
    backend: Backend
    device_slab: torch.Tensor  # uint8 [device pages × page_bytes]
    host_slab: torch.Tensor  # uint8, pinned when the pool is on a GPU; empty without host pages
    device_ring: torch.Tensor  # int32 [device pages]
    host_ring: torch.Tensor  # int32 [host pages]
    state: torch.Tensor  # int64, see Counter
    accounts: torch.Tensor  # int64 [ACCOUNTS, 2]: valid bytes now and at their peak
    overflow: torch.Tensor  # float32, 0-d: 0 or 1

    @property
    def device_pages(self) -> int:
        return self.device_ring.numel()

    @property
    def host_pages(self) -> int:
        return self.host_ring.numel()


def chunk_bytes(page_bytes: int, most: int) -> int:
    """The largest power of two that divides a page, at most `most`: what one program copies at a time."""
    return min(page_bytes & -page_bytes, most)
