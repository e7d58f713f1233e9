"""`PagePool`: stash the valid rows of tensors in pages, restore them, give the pages back."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pagestash.kernels import copy, release, stash
from pagestash.kernels.backend import choose
from pagestash.kernels.layout import ACCOUNTS, HOST_BASE, Counter, PoolMemory
from pagestash.pages.host import host_slab
from pagestash.pages.telemetry import PoolStats, read_stats
from pagestash.pages.ticket import Ticket, TicketGroup, lay_out

Rows = int | torch.Tensor | None
_pool_ids = itertools.count()


class PagePool:
    """All pages of all tiers, and their free lists, on the device.

    Nothing here but `stats` waits for the device, and every launch is the same whatever the number of rows:
    a CUDA graph can record it. All calls belong on one stream, or on streams the caller has ordered.

        pool = PagePool("cuda", device_bytes=8 << 30)
        tickets = pool.stash([x, y], rows=n)     # n: an int, a device integer, or None for all rows
        x2, y2 = pool.restore(tickets)           # original shapes, rows past n are zero
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
        on_device = _count_pages("device", device_pages, device_bytes, page_bytes)
        on_host = _count_pages("host", host_pages, host_bytes, page_bytes, default=0)
        if on_device + on_host == 0:
            raise ValueError("device_pages=0 and host_pages=0: a pool needs at least one page")
        self._id = next(_pool_ids)
        self._live = 0
        state = torch.zeros(len(Counter), dtype=torch.int64, device=self.device)
        state[Counter.DEVICE_FREE].fill_(on_device)
        state[Counter.HOST_FREE].fill_(on_host)
        self.memory = PoolMemory(
            page_bytes=page_bytes,
            backend=choose(self.device, backend),
            device_slab=torch.empty(on_device * page_bytes, dtype=torch.uint8, device=self.device),
            host_slab=host_slab(on_host * page_bytes, self.device),
            device_ring=_ids(0, on_device, self.device),
            host_ring=_ids(HOST_BASE, on_host, self.device),
            state=state,
            accounts=torch.zeros(ACCOUNTS, 2, dtype=torch.int64, device=self.device),
            overflow=torch.zeros((), dtype=torch.float32, device=self.device),
        )

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
        """A 0-d float32 on the device, 1 once a group did not fit, until `reset`.

        Set it as a fused optimizer's `found_inf`, and the step that overflowed changes no weight.
        """
        return self.memory.overflow

    @property
    def live_tickets(self) -> int:
        """Tickets not yet released, as the host knows it; does not wait for the device."""
        return self._live

    def stash(
        self,
        tensors: Sequence[torch.Tensor],
        rows: Rows | Sequence[Rows] = None,
        *,
        account: int = 0,
        host_later: bool = False,
    ) -> list[Ticket]:
        """Copy the valid rows of `tensors` into pages, in one reservation: all of them or none.

        `rows` is None (all rows), an int, or a one-element integer tensor on the pool's device, which the host
        never reads; a sequence gives each tensor its own, with at most one device tensor among them. A device
        integer outside 0…capacity is taken as the nearer of the two. `account` is the row of
        `memory.accounts` that counts the bytes. With `host_later` the bytes that belong in host pages are not
        copied yet: `spill` does it, on a stream of the caller's choice.
        """
        sources, fixed, on_device = self._check_stash(tensors, rows, account)
        spans, length = lay_out(tensors, self.page_bytes)
        book = torch.empty(length, dtype=torch.int64, device=self.device)
        group = TicketGroup(self._id, book, spans, account)
        if len(spans) <= stash.FUSED:
            stash.stash(self.memory, sources, spans, fixed, on_device, book, account, host_later=host_later)
        else:
            stash.reserve(self.memory, spans, fixed, on_device, book, account)
            copy.copy_to_pages(
                self.memory, sources, spans, range(len(spans)), book, tiers="device" if host_later else "both"
            )
        self._live += len(spans)
        return [Ticket(group, i, tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors)]

    def spill(self, tickets: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> None:
        """The second half of `stash(..., host_later=True)`: copy what belongs in host pages.

        Launched with a few blocks, to run on a side stream beside compute. The caller orders it after the
        stash, keeps `tensors` unchanged and unfreed until it is done, and orders every restore after it.
        """
        if not self.host_pages:
            return
        checked = self._check_tickets(tickets, "spill")
        self._check_buffers(checked, tensors, "tensors")
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
        """The stashed tensors in their original shapes; rows that were not valid hold `fill`.

        With `fill=None` they are left uninitialised. Pages are not given up: restore as often as needed. The
        tensors of a group that overflowed come back filled whole, with zeros where `fill` is None.
        """
        buffers = self.buffers(tickets)
        self.restore_into(tickets, buffers, fill)
        return buffers

    def buffers(self, tickets: Sequence[Ticket]) -> list[torch.Tensor]:
        """Uninitialised tensors of the tickets' shapes, to restore into."""
        checked = self._check_tickets(tickets, "restore")
        return [torch.empty(ticket.shape, dtype=ticket.dtype, device=self.device) for ticket in checked]

    def restore_into(
        self,
        tickets: Sequence[Ticket],
        buffers: Sequence[torch.Tensor],
        fill: float | None = 0.0,
        *,
        tiers: copy.Tiers = "both",
    ) -> None:
        """Restore into `buffers`; one tier at a time where the host half runs ahead on a side stream."""
        checked = self._check_tickets(tickets, "restore")
        self._check_buffers(checked, buffers, "buffers")
        patterns = {buffer.dtype: _pattern(fill, buffer.dtype) for buffer in buffers}
        for (group, members), parts in _by_group(checked, buffers):
            copy.copy_from_pages(
                self.memory,
                [_flat(part) for part in parts],
                [group.spans[member] for member in members],
                members,
                group.book,
                [patterns[part.dtype] for part in parts],
                tiers=tiers,
            )

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Give the tickets' pages back; a ticket can be released once."""
        for (group, members), _ in _by_group(self._check_tickets(tickets, "release"), tickets):
            spans = [group.spans[member] for member in members]
            release.release(self.memory, spans, members, group.book, group.account)
        for ticket in tickets:
            ticket.released = True
        self._live -= len(tickets)

    def reset(self) -> None:
        """Clear the overflow flag and count peaks from what is in use now; live tickets are untouched."""
        state = self.memory.state
        self.memory.overflow.zero_()
        # zero_ and fill_ carry the number in the launch; an assignment would copy it from the host, and wait.
        state[Counter.DEVICE_PEAK] = self.device_pages - state[Counter.DEVICE_FREE]
        state[Counter.HOST_PEAK] = self.host_pages - state[Counter.HOST_FREE]
        state[Counter.WANTED_PEAK] = state[Counter.WANTED]
        state[Counter.BYTES_PEAK] = state[Counter.BYTES]
        state[Counter.SPILLED].zero_()
        state[Counter.REFUSED].zero_()
        self.memory.accounts[:, 1] = self.memory.accounts[:, 0]

    def stats(self) -> PoolStats:
        """Pages and bytes in use, at their peak and wanted, by tier. Waits for the device."""
        return read_stats(self.memory)

    def grow(self, device_pages: int | None = None, host_pages: int | None = None) -> None:
        """Grow to the given totals, between steps; what is stashed stays stashed.

        The slabs move, so a CUDA graph that was captured with this pool must be captured again.
        """
        memory = self.memory
        to_device = self.device_pages if device_pages is None else device_pages
        to_host = self.host_pages if host_pages is None else host_pages
        for name, old, new in (
            ("device_pages", self.device_pages, to_device),
            ("host_pages", self.host_pages, to_host),
        ):
            if new < old:
                raise ValueError(f"{name}={new}: the pool has {old}, and a pool only grows")
            _check_most(name, new)
        if to_device > self.device_pages:
            memory.device_slab = self._moved(memory.device_slab, to_device * self.page_bytes)
            memory.device_ring = _grown_ring(memory, to_device, 0)
        if to_host > self.host_pages:
            # Kernels may still be writing the old slab, and the host is about to read it.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            slab = host_slab(to_host * self.page_bytes, self.device)
            if self._live:
                slab[: memory.host_slab.numel()].copy_(memory.host_slab)
            memory.host_slab = slab
            memory.host_ring = _grown_ring(memory, to_host, HOST_BASE)

    def resize(self, device_pages: int) -> None:
        """Make the device tier exactly `device_pages`, larger or smaller; nothing may be stashed."""
        if self._live:
            raise ValueError(
                f"device_pages={device_pages}: {self._live} tickets are live; release them first"
            )
        if device_pages < 1:
            raise ValueError(f"device_pages={device_pages}: expected at least 1")
        _check_most("device_pages", device_pages)
        memory = self.memory
        memory.device_slab = self._moved(memory.device_slab, device_pages * self.page_bytes)
        memory.device_ring = _ids(0, device_pages, self.device)
        memory.state[Counter.DEVICE_HEAD].zero_()
        memory.state[Counter.DEVICE_FREE].fill_(device_pages)
        self.reset()

    def _moved(self, slab: torch.Tensor, size: int) -> torch.Tensor:
        if not self._live:
            # Nothing to keep: the old slab's memory goes first, so the peak is one slab and not two.
            before = slab.numel()
            self.memory.device_slab = slab = slab.new_empty(0)
            try:
                return torch.empty(size, dtype=torch.uint8, device=self.device)
            except RuntimeError:
                # No room for the new one: the pool goes on at its old size.
                self.memory.device_slab = slab.new_empty(before)
                raise
        moved = torch.empty(size, dtype=torch.uint8, device=self.device)
        moved[: slab.numel()].copy_(slab)
        return moved

    def _check_stash(
        self, tensors: Sequence[torch.Tensor], rows: Rows | Sequence[Rows], account: int
    ) -> tuple[list[torch.Tensor], list[int], torch.Tensor | None]:
        """Flat byte views of the tensors, their fixed rows (-1: on the device), and the device integer."""
        if isinstance(tensors, torch.Tensor):
            raise ValueError("tensors: expected a sequence of tensors, got one tensor; pass [tensor]")
        if not 0 <= account < ACCOUNTS:
            raise ValueError(f"account={account}: expected 0 to {ACCOUNTS - 1}")
        each: list[Rows] = list(rows) if isinstance(rows, Sequence) else [rows] * len(tensors)
        if len(each) != len(tensors):
            raise ValueError(f"rows: {len(each)} values for {len(tensors)} tensors")
        fixed: list[int] = []
        on_device: torch.Tensor | None = None
        for index, (tensor, count) in enumerate(zip(tensors, each)):
            name = f"tensors[{index}]"
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, the pool on {self.device}")
            if tensor.layout != torch.strided or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
                    "pass tensor.contiguous()"
                )
            if tensor.is_conj() or tensor.is_neg():
                raise ValueError(
                    f"{name} is a lazy conjugate or negative; pass its resolve_conj().resolve_neg()"
                )
            capacity = tensor.shape[0] if tensor.ndim else 1
            if count is None:
                fixed.append(capacity)
            elif isinstance(count, torch.Tensor):
                if count.device != self.device:
                    raise ValueError(f"rows is on {count.device}, the pool on {self.device}")
                if count.numel() != 1 or count.dtype not in (torch.int32, torch.int64):
                    raise ValueError(
                        f"rows has shape {tuple(count.shape)} and dtype {count.dtype}: "
                        "expected one int32 or int64 element"
                    )
                if on_device is not None and on_device is not count:
                    raise ValueError("rows: at most one device integer a call; stash in two calls")
                on_device = count
                fixed.append(-1)
            elif not hasattr(count, "__index__"):
                raise ValueError(f"rows={count!r}: expected None, an int, or a one-element integer tensor")
            elif not 0 <= count <= capacity:
                raise ValueError(f"rows={count}: {name} has {capacity} rows")
            else:
                fixed.append(int(count))
        return [_flat(tensor) for tensor in tensors], fixed, on_device

    def _check_tickets(self, tickets: Sequence[Ticket], verb: str) -> Sequence[Ticket]:
        if isinstance(tickets, Ticket):
            raise ValueError("tickets: expected a sequence of tickets, got one; pass [ticket]")
        for index, ticket in enumerate(tickets):
            if ticket.group.pool_id != self._id:
                raise ValueError(f"tickets[{index}] belongs to another pool: cannot {verb} it here")
            if ticket.released:
                raise ValueError(f"tickets[{index}] was released before: cannot {verb} it again")
        if verb == "release" and len({id(ticket) for ticket in tickets}) != len(tickets):
            raise ValueError("tickets: the same ticket stands in the list twice; a ticket is released once")
        return tickets

    def _check_buffers(self, tickets: Sequence[Ticket], buffers: Sequence[torch.Tensor], name: str) -> None:
        """Kernels trust these: one contiguous tensor a ticket, on the pool's device, of the ticket's size."""
        if len(buffers) != len(tickets):
            raise ValueError(f"{name}: {len(buffers)} tensors for {len(tickets)} tickets")
        for index, (ticket, buffer) in enumerate(zip(tickets, buffers)):
            if buffer.device != self.device:
                raise ValueError(f"{name}[{index}] is on {buffer.device}, the pool on {self.device}")
            if not buffer.is_contiguous():
                raise ValueError(
                    f"{name}[{index}] of shape {tuple(buffer.shape)} and strides {buffer.stride()} "
                    "is not contiguous"
                )
            if buffer.nbytes != ticket.span.max_bytes:
                raise ValueError(
                    f"{name}[{index}] has {buffer.nbytes} bytes, the ticket's tensor {ticket.span.max_bytes}"
                )


def _indexed(device: torch.device) -> torch.device:
    """`cuda` as `cuda:0`, so that it compares equal to a tensor's device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _count_pages(
    tier: str, pages: int | None, size: int | None, page_bytes: int, default: int | None = None
) -> int:
    if pages is not None and size is not None:
        raise ValueError(f"{tier}_pages={pages} and {tier}_bytes={size}: give one of the two")
    if size is not None:
        if size < 0:
            raise ValueError(f"{tier}_bytes={size}: expected 0 or more")
        pages = -(-size // page_bytes)
    if pages is None:
        pages = default
    if pages is None:
        raise ValueError(f"{tier}_pages or {tier}_bytes: one of them is needed")
    if pages < 0:
        raise ValueError(f"{tier}_pages={pages}: expected 0 or more")
    _check_most(f"{tier}_pages", pages)
    return pages


def _check_most(name: str, pages: int) -> None:
    if pages >= HOST_BASE:
        raise ValueError(f"{name}={pages}: at most {HOST_BASE - 1}; use larger pages")


def _ids(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)


def _grown_ring(memory: PoolMemory, pages: int, base: int) -> torch.Tensor:
    """A tier's ring at its new length, new ids first, with head and count moved along; reads nothing back.

    How many of the old ids are free only the device knows; they come last, so that the count alone says where
    the free ones end.
    """
    ring, head, free = (
        (memory.host_ring, Counter.HOST_HEAD, Counter.HOST_FREE)
        if base
        else (memory.device_ring, Counter.DEVICE_HEAD, Counter.DEVICE_FREE)
    )
    state, old = memory.state, ring.numel()
    at = (torch.arange(old, device=ring.device) + state[head]) % max(old, 1)
    grown = torch.cat([_ids(base + old, pages - old, ring.device), ring[at]])
    state[head].zero_()
    state[free] += pages - old
    return grown


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _pattern(fill: float | None, dtype: torch.dtype) -> int | None:
    """Eight bytes of `fill` in `dtype`, as the integer that kernels write over a tail."""
    if fill is None:
        return None
    if fill == 0:
        return 0
    if dtype.itemsize > 8:
        raise ValueError(f"fill={fill}: only 0 or None for {dtype}")
    try:
        return int(torch.full((8 // dtype.itemsize,), fill, dtype=dtype).view(torch.int64))
    except RuntimeError as error:
        raise ValueError(f"fill={fill}: no value of {dtype} ({error})") from None


def _by_group(
    tickets: Sequence[Ticket], values: Sequence[Any]
) -> Iterable[tuple[tuple[TicketGroup, list[int]], list[Any]]]:
    """Tickets of one group together, in order: ((group, members), their values)."""
    found: dict[int, tuple[tuple[TicketGroup, list[int]], list]] = {}
    for ticket, value in zip(tickets, values, strict=True):
        entry = found.setdefault(id(ticket.group), ((ticket.group, []), []))
        entry[0][1].append(ticket.member)
        entry[1].append(value)
    return found.values()
