"""`PagePool`: stash the valid rows of tensors in pages, restore them, release the pages."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pagestash.kernels.backend import choose
from pagestash.kernels.pages import copy, release, stash
from pagestash.kernels.pages.layout import ACCOUNTS, HOST_BASE, Counter, PoolMemory
from pagestash.kernels.pages.paged import Pages
from pagestash.pages.checks import (
    Rows,
    check_buffers,
    check_most,
    check_rows,
    check_stash,
    check_tickets,
    count_pages,
    fill_pattern,
)
from pagestash.pages.host import host_slab
from pagestash.pages.rings import grown_ring, ids
from pagestash.pages.room import Room
from pagestash.pages.telemetry import PoolStats, read_stats
from pagestash.pages.ticket import Ticket, TicketGroup, lay_out

_pool_ids = itertools.count()


class PagePool:
    """All pages of both tiers, with their free lists and counters, on the device.

    Only `stats` waits for the device, and launches do not depend on the number of rows, so a CUDA graph can record
    them. Make all calls on one stream, or on streams that you have ordered.

        pool = PagePool("cuda", device_bytes=8 << 30)
        tickets = pool.stash([x, y], rows=n)     # n: an int, a device integer, or None for all rows
        x2, y2 = pool.restore(tickets)           # original shapes; rows past n are zero
        pool.release(tickets)
    """

    def __init__(
        self,
        device: torch.device | str,
        page_bytes: int = 65536,
        device_pages: int | None = None,
        host_pages: int | None = None,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        backend: str = "auto",
    ) -> None:
        self.device = _indexed(torch.device(device))
        if page_bytes <= 0 or page_bytes % 16:
            raise ValueError(f"page_bytes={page_bytes}: expected a positive multiple of 16 bytes")
        on_device = count_pages("device", device_pages, device_bytes, page_bytes)
        on_host = count_pages("host", host_pages, host_bytes, page_bytes, default=0)
        if on_device + on_host == 0:
            raise ValueError("device_pages=0 and host_pages=0: a pool needs at least one page")
        self._id = next(_pool_ids)
        self._live = 0
        self._dying: deque[Ticket] = deque()
        self.leases: set[Ticket] = set()
        """Tickets of `reserve` that are not released."""
        self.reservations = 0
        """Number of reservations so far, counted on the host."""
        state = torch.zeros(len(Counter), dtype=torch.int64, device=self.device)
        state[Counter.DEVICE_FREE].fill_(on_device)
        state[Counter.HOST_FREE].fill_(on_host)
        self.memory = PoolMemory(
            page_bytes=page_bytes,
            backend=choose(self.device, backend),
            device_slab=torch.empty(on_device * page_bytes, dtype=torch.uint8, device=self.device),
            host_slab=host_slab(on_host * page_bytes, self.device),
            device_ring=ids(0, on_device, self.device),
            host_ring=ids(HOST_BASE, on_host, self.device),
            state=state,
            accounts=torch.zeros(ACCOUNTS, 2, dtype=torch.int64, device=self.device),
            overflow=torch.zeros((), dtype=torch.float32, device=self.device),
        )
        self.room = Room(self.memory)

    def __repr__(self) -> str:
        return (
            f"PagePool({str(self.device)!r}, page_bytes={self.page_bytes}, "
            f"device_pages={self.device_pages}, host_pages={self.host_pages})"
        )

    @property
    def page_bytes(self) -> int:
        return self.memory.page_bytes

    @property
    def device_pages(self) -> int:
        return self.memory.device_pages

    @property
    def host_pages(self) -> int:
        return self.memory.host_pages

    @property
    def overflow(self) -> torch.Tensor:
        """A 0-d float32 on the device: 1 after a group did not fit, until `reset`.

        As a fused optimizer's `found_inf` it makes an overflowing step change no weight.
        """
        return self.memory.overflow

    @property
    def live_tickets(self) -> int:
        """Tickets that are not released, counted on the host; does not wait for the device."""
        return self._live

    def stash(
        self,
        tensors: Sequence[torch.Tensor],
        rows: Rows | Sequence[Rows] = None,
        *,
        account: int = 0,
        host_later: bool = False,
    ) -> list[Ticket]:
        """Copy the valid rows of `tensors` into pages, with one reservation: all tensors get pages or none.

        `rows` is None (all rows), an int, or a one-element integer tensor on the pool's device, which the host
        never reads. A sequence has one value per tensor, with at most one device tensor among them. A count on
        the device is clamped to 0…capacity. `account` is the row of `memory.accounts` that counts the bytes.
        With `host_later`, bytes for host pages are not copied yet: `spill` does that, on a stream of the
        caller's choice.
        """
        fixed, on_device = check_stash(self.device, tensors, rows, account)
        self.flush()
        self.reservations += 1
        sources = [_flat(tensor) for tensor in tensors]
        group, tickets = self._group(tensors, account)
        spans, book = group.spans, group.book
        self.room.enter(tickets, fixed)
        if len(spans) <= stash.FUSED:
            stash.stash(self.memory, sources, spans, fixed, on_device, book, account, host_later=host_later)
        else:
            stash.reserve(self.memory, spans, fixed, on_device, book, account)
            copy.copy_to_pages(
                self.memory, sources, spans, range(len(spans)), book, tiers="device" if host_later else "both"
            )
        self._live += len(spans)
        self.room.reserved(tickets, fixed)
        return tickets

    def reserve(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: torch.Tensor,
        *,
        account: int = 0,
        expendable: bool = False,
    ) -> Ticket:
        """Reserve pages for the valid rows of a tensor that the caller's own kernel will write.

        `expendable` means that the tensor can be recomputed. Such a group gets device pages only, and only if

            its pages <= free device pages - (REQUIRED_PEAK - pages of required groups now).

        Otherwise it gets none, which is no overflow: the ticket's status on the device says so.
        """
        template = torch.empty(tuple(shape), dtype=dtype, device="meta")
        (ticket,) = self._reserve([template], rows, account, expendable)
        self.leases.add(ticket)
        return ticket

    def reserve_bytes(
        self, shapes: Sequence[tuple[int, int]], rows: torch.Tensor | None, *, account: int = 0
    ) -> list[Ticket]:
        """Reserve pages, for all or none, for uint8 tensors [rows, row bytes] that the caller's kernels will write.

        `rows` is the number of valid rows of each, on the device; None for all rows.
        """
        templates = [torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes]
        return self._reserve(templates, rows, account)

    def _reserve(
        self,
        templates: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        account: int,
        expendable: bool = False,
    ) -> list[Ticket]:
        """Reserve pages, for all or none, for tensors like these on the meta device."""
        if rows is not None:
            check_rows(self.device, rows)
        group, tickets = self._group(templates, account)
        fixed = [span.capacity if rows is None else -1 for span in group.spans]
        self.flush()
        self.reservations += 1
        self.room.enter(tickets, fixed, expendable=expendable)
        stash.reserve(self.memory, group.spans, fixed, rows, group.book, account, expendable=expendable)
        self._live += len(tickets)
        self.room.reserved(tickets, fixed, expendable=expendable)
        return tickets

    def _group(self, tensors: Sequence[torch.Tensor], account: int) -> tuple[TicketGroup, list[Ticket]]:
        """Tickets for tensors like these, that are reserved together."""
        spans, length = lay_out(tensors, self.page_bytes)
        book = torch.empty(length, dtype=torch.int64, device=self.device)
        group = TicketGroup(self._id, book, spans, account)
        return group, [Ticket(group, i, tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors)]

    def pages_of(self, ticket: Ticket) -> Pages:
        """Where a live ticket's tensor is, for kernels that write or read its pages in place."""
        check_tickets(self._id, [ticket], "use")
        return Pages(self.memory, ticket.span, ticket.member, ticket.group.book)

    def spill(self, tickets: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> None:
        """The second half of `stash(..., host_later=True)`: copy the bytes for host pages.

        The kernel has few blocks, to run on a side stream beside compute. The caller orders it after the stash,
        keeps `tensors` allocated and unchanged until it is done, and orders every restore after it.
        """
        if not self.host_pages:
            return
        checked = check_tickets(self._id, tickets, "spill")
        check_buffers(self.device, checked, tensors, "tensors")
        for (group, members), sources in _by_group(checked, tensors):
            copy.copy_to_pages(
                self.memory,
                [_flat(source) for source in sources],
                [group.spans[member] for member in members],
                members,
                group.book,
                tiers="host",
            )

    def restore(self, tickets: Sequence[Ticket], fill: float | None = 0.0) -> list[torch.Tensor]:
        """The stashed tensors in their original shapes; invalid rows hold `fill`.

        With `fill=None` they are uninitialised. The pages stay reserved, so a ticket can be restored many times.
        Tensors of a group that overflowed hold `fill` everywhere, or zeros if `fill` is None.
        """
        buffers = self.buffers(tickets)
        self.restore_into(tickets, buffers, fill)
        return buffers

    def buffers(self, tickets: Sequence[Ticket]) -> list[torch.Tensor]:
        """Uninitialised tensors of the tickets' shapes, to restore into."""
        checked = check_tickets(self._id, tickets, "restore")
        return [torch.empty(ticket.shape, dtype=ticket.dtype, device=self.device) for ticket in checked]

    def restore_into(
        self,
        tickets: Sequence[Ticket],
        buffers: Sequence[torch.Tensor],
        fill: float | None = 0.0,
        *,
        tiers: copy.Tiers = "both",
        unless: torch.Tensor | None = None,
    ) -> None:
        """Restore into `buffers`; `tiers` allows the host half to run ahead on a side stream.

        `unless` is the status of other pages (`Pages.status`): where they were granted, nothing is restored.
        """
        checked = check_tickets(self._id, tickets, "restore")
        check_buffers(self.device, checked, buffers, "buffers")
        patterns = {buffer.dtype: fill_pattern(fill, buffer.dtype) for buffer in buffers}
        for (group, members), parts in _by_group(checked, buffers):
            copy.copy_from_pages(
                self.memory,
                [_flat(part) for part in parts],
                [group.spans[member] for member in members],
                members,
                group.book,
                [patterns[part.dtype] for part in parts],
                tiers=tiers,
                unless=unless,
            )

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Return the tickets' pages to the free lists; a ticket can be released once."""
        for (group, members), _ in _by_group(check_tickets(self._id, tickets, "release"), tickets):
            spans = [group.spans[member] for member in members]
            release.release(self.memory, spans, members, group.book, group.account)
        self._gone(tickets)

    def release_later(self, ticket: Ticket) -> None:
        """Release at the next call that launches anything. Any thread may call this: tensors die in any thread."""
        self._dying.append(ticket)

    def flush(self) -> None:
        """Release the tickets of `release_later`, on the current stream."""
        dead = self._take_dying()
        if dead:
            self.release(dead)

    def discard(self) -> None:
        """Forget the tickets of `release_later`, after a failed capture: nothing has happened on the device."""
        self._gone(self._take_dying())

    def _take_dying(self) -> list[Ticket]:
        dead: dict[Ticket, None] = {}
        while self._dying:
            dead[self._dying.popleft()] = None
        return [ticket for ticket in dead if not ticket.released]

    def _gone(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.released = True
        self.leases.difference_update(tickets)
        self._live -= len(tickets)
        self.room.leave(tickets)

    def reset(self) -> None:
        """Clear the overflow flag and restart peaks at what is in use now; live tickets are untouched."""
        state = self.memory.state
        self.memory.overflow.zero_()
        # zero_ and fill_ pass the number in the launch; an assignment would copy it from the host and wait.
        state[Counter.DEVICE_PEAK] = self.device_pages - state[Counter.DEVICE_FREE]
        state[Counter.HOST_PEAK] = self.host_pages - state[Counter.HOST_FREE]
        state[Counter.WANTED_PEAK] = state[Counter.WANTED]
        state[Counter.BYTES_PEAK] = state[Counter.BYTES]
        state[Counter.SPILLED].zero_()
        state[Counter.REFUSED].zero_()
        state[Counter.GIVEN_UP].zero_()
        self.memory.accounts[:, 1] = self.memory.accounts[:, 0]

    def stats(self) -> PoolStats:
        """Pages and bytes in use, at their peak and wanted, by tier. Waits for the device."""
        self.flush()
        return read_stats(self.memory)

    def grow(self, device_pages: int | None = None, host_pages: int | None = None) -> None:
        """Grow to the given totals, between steps; stashed tensors stay stashed.

        The slabs move, so a CUDA graph that uses this pool must be captured again.
        """
        memory = self.memory
        to_device = self.device_pages if device_pages is None else device_pages
        to_host = self.host_pages if host_pages is None else host_pages
        for name, old, new in (
            ("device_pages", self.device_pages, to_device),
            ("host_pages", self.host_pages, to_host),
        ):
            if new < old:
                raise ValueError(f"{name}={new}: the pool has {old} and cannot shrink")
            check_most(name, new)
        if to_device > self.device_pages:
            memory.device_slab = self._moved(memory.device_slab, to_device * self.page_bytes)
            memory.device_ring = grown_ring(memory, to_device, 0)
        if to_host > self.host_pages:
            # Kernels may still be writing the old slab, and the host is about to read it.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            slab = host_slab(to_host * self.page_bytes, self.device)
            if self._live:
                slab[: memory.host_slab.numel()].copy_(memory.host_slab)
            memory.host_slab = slab
            memory.host_ring = grown_ring(memory, to_host, HOST_BASE)

    def resize(self, device_pages: int) -> None:
        """Make the device tier exactly `device_pages`, larger or smaller; nothing may be stashed."""
        if self._live:
            raise ValueError(
                f"device_pages={device_pages}: {self._live} tickets are live; release them first"
            )
        if device_pages < 1:
            raise ValueError(f"device_pages={device_pages}: expected at least 1")
        check_most("device_pages", device_pages)
        memory = self.memory
        memory.device_slab = self._moved(memory.device_slab, device_pages * self.page_bytes)
        memory.device_ring = ids(0, device_pages, self.device)
        memory.state[Counter.DEVICE_HEAD].zero_()
        memory.state[Counter.DEVICE_FREE].fill_(device_pages)
        self.reset()

    def _moved(self, slab: torch.Tensor, size: int) -> torch.Tensor:
        if not self._live:
            # Nothing to copy: free the old slab first, so that the peak is one slab and not two.
            before = slab.numel()
            self.memory.device_slab = slab = slab.new_empty(0)
            try:
                return torch.empty(size, dtype=torch.uint8, device=self.device)
            except RuntimeError:
                # Not enough memory for the new slab: keep the old size.
                self.memory.device_slab = slab.new_empty(before)
                raise
        moved = torch.empty(size, dtype=torch.uint8, device=self.device)
        moved[: slab.numel()].copy_(slab)
        return moved


def _indexed(device: torch.device) -> torch.device:
    """`cuda` as `cuda:0`, so that it compares equal to a tensor's device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _by_group(
    tickets: Sequence[Ticket], values: Sequence[Any]
) -> Iterable[tuple[tuple[TicketGroup, list[int]], list[Any]]]:
    """The tickets by group, in order: ((group, members), their values)."""
    found: dict[int, tuple[tuple[TicketGroup, list[int]], list]] = {}
    for ticket, value in zip(tickets, values, strict=True):
        entry = found.setdefault(id(ticket.group), ((ticket.group, []), []))
        entry[0][1].append(ticket.member)
        entry[1].append(value)
    return found.values()
