"""One sequence of operations on the reference ring and on a pool of each backend, compared after every step.

Compared are all counters, the page ids in the tables, the order of the free ids, the bytes in the pages and the
bytes that come back. What nobody may read is 0xFF, which is NaN in every floating type here: free pages, rows
that are not valid, and buffers before they are restored into.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from reference_ring import ReferenceRing, ReferenceTicket

from pagestash.kernels.pages.layout import HEADER, HOST_BASE, Counter, Header, Status
from pagestash.pages.pool import PagePool
from pagestash.pages.telemetry import PoolStats, TierStats
from pagestash.pages.ticket import Ticket

POISON = 0xFF
ON_DEVICE = "on device"


@dataclass(frozen=True)
class Spec:
    """A tensor to stash: `capacity` rows of shape `row` (None: 0-d), `skew` elements into its memory."""

    dtype: torch.dtype
    capacity: int | None
    row: tuple[int, ...] = ()
    skew: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.capacity is None else (self.capacity, *self.row)

    @property
    def rows(self) -> int:
        return 1 if self.capacity is None else self.capacity

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    def poisoned(self, device: torch.device | str) -> torch.Tensor:
        before, size = self.skew * self.dtype.itemsize, self.rows * self.row_bytes
        memory = torch.full((before + size,), POISON, dtype=torch.uint8, device=device)
        return memory[before:].view(self.dtype).reshape(self.shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(eq=False)
class Entry:
    """One live tensor: its ticket everywhere, and the valid bytes it must keep."""

    spec: Spec
    group: int
    account: int
    valid: torch.Tensor
    expected: ReferenceTicket
    tickets: dict[str, Ticket]

    def restored(self, fill: float | None) -> torch.Tensor:
        """The bytes a restore into a poisoned buffer must leave."""
        size = self.spec.rows * self.spec.row_bytes
        octets = torch.full((size,), POISON, dtype=torch.uint8)
        if fill is not None:
            element = torch.full((1,), fill, dtype=self.spec.dtype).view(torch.uint8)
            octets = element.repeat(size // self.spec.dtype.itemsize)
        elif not self.expected.granted:
            octets.zero_()
        octets = octets.to(self.valid.device)
        if self.expected.granted:
            octets[: self.valid.numel()] = self.valid
        return octets


class ThreeWays:
    """The ring and the pools, driven together; `live` are the tensors not yet released."""

    def __init__(
        self,
        page_bytes: int,
        device_pages: int,
        host_pages: int,
        *,
        device: str = "cpu",
        backends: Sequence[str] = ("torch", "triton"),
        seed: int = 0,
    ) -> None:
        self.page_bytes = page_bytes
        self.device = device
        self.ring = ReferenceRing(page_bytes, device_pages, host_pages)
        self.pools = {
            backend: PagePool(device, page_bytes, device_pages, host_pages, backend=backend)
            for backend in backends
        }
        self.random = torch.Generator(device).manual_seed(seed)
        self.live: list[Entry] = []
        self.groups = 0
        self.account_bytes: dict[int, list[int]] = {}
        self.valid_bytes_peak = 0
        self.poison_free_pages()
        self.check()

    # --- the operations -----------------------------------------------------------------------------------------

    def stash(
        self,
        specs: Sequence[Spec],
        rows: Sequence[int | str | None] | int | str | None = None,
        *,
        device_rows: int = 0,
        device_dtype: torch.dtype = torch.int64,
        account: int = 0,
        host_later: bool = False,
    ) -> list[Entry]:
        """Stash random tensors; `ON_DEVICE` in `rows` stands for a device integer of value `device_rows`."""
        integer = torch.tensor([device_rows], dtype=device_dtype, device=self.device)[0]
        each = list(rows) if isinstance(rows, list) else [rows] * len(specs)
        sources, lengths = [], []
        for spec, count in zip(specs, each, strict=True):
            if count is None:
                count = spec.rows
            elif count == ON_DEVICE:
                count = min(max(device_rows, 0), spec.rows)
            source = spec.poisoned(self.device)
            length = count * spec.row_bytes
            as_bytes(source)[:length] = torch.randint(
                256, (length,), dtype=torch.uint8, device=self.device, generator=self.random
            )
            sources.append(source)
            lengths.append(length)
        expected = self.ring.reserve(lengths)
        now_and_peak = self.account_bytes.setdefault(account, [0, 0])
        now_and_peak[0] += sum(lengths)
        now_and_peak[1] = max(now_and_peak)
        self.valid_bytes_peak = max(self.valid_bytes_peak, self.valid_bytes)
        argument = [integer if count == ON_DEVICE else count for count in each]
        tickets = {}
        for name, pool in self.pools.items():
            copies = [spec.poisoned(self.device) for spec in specs]
            for copied, source in zip(copies, sources):
                as_bytes(copied).copy_(as_bytes(source))
            tickets[name] = pool.stash(
                copies,
                argument if isinstance(rows, list) else argument[0] if argument else None,
                account=account,
                host_later=host_later,
            )
            if host_later:
                pool.spill(tickets[name], copies)
            for copied in copies:  # the stash is a copy: what happens to the tensor later is no concern of it
                as_bytes(copied).fill_(POISON)
        added = [
            Entry(
                spec,
                self.groups,
                account,
                as_bytes(sources[i])[: lengths[i]],
                expected[i],
                {name: tickets[name][i] for name in self.pools},
            )
            for i, spec in enumerate(specs)
        ]
        self.groups += 1
        self.live += added
        self.check()
        return added

    def restore(
        self, entries: Sequence[Entry], fill: float | None = 0.0, *, one_tier_at_a_time=False
    ) -> None:
        if (
            fill is not None
            and fill != fill
            and any(not entry.spec.dtype.is_floating_point for entry in entries)
        ):
            fill = 1.0  # there is no integer NaN
        for name, pool in self.pools.items():
            tickets = [entry.tickets[name] for entry in entries]
            buffers = [entry.spec.poisoned(self.device) for entry in entries]
            if one_tier_at_a_time:
                pool.restore_into(tickets, buffers, fill, tiers="host")
                pool.restore_into(tickets, buffers, fill, tiers="device")
            elif any(entry.spec.skew for entry in entries) or fill is None:
                pool.restore_into(tickets, buffers, fill)
            else:
                buffers = pool.restore(tickets, fill)
            for entry, buffer in zip(entries, buffers):
                assert buffer.shape == entry.spec.shape
                assert buffer.dtype == entry.spec.dtype
                assert torch.equal(as_bytes(buffer), entry.restored(fill)), (name, entry)
        self.check()

    def release(self, entries: Sequence[Entry]) -> None:
        for name, pool in self.pools.items():
            pool.release([entry.tickets[name] for entry in entries])
        # A pool gives back group by group, in the order in which the groups are first named.
        first = {entry.group: at for at, entry in reversed(list(enumerate(entries)))}
        for entry in sorted(entries, key=lambda entry: first[entry.group]):
            self.ring.release([entry.expected])
            self.account_bytes[entry.account][0] -= entry.valid.numel()
        self.live = [entry for entry in self.live if entry not in entries]
        self.poison_free_pages()
        self.check()

    def grow(self, more_device: int, more_host: int) -> None:
        totals = (self.ring.total["device"] + more_device, self.ring.total["host"] + more_host)
        self.ring.grow(*totals)
        for pool in self.pools.values():
            pool.grow(*totals)
        self.poison_free_pages()
        self.check()

    def reset(self) -> None:
        self.ring.reset()
        for now_and_peak in self.account_bytes.values():
            now_and_peak[1] = now_and_peak[0]
        self.valid_bytes_peak = self.valid_bytes
        for pool in self.pools.values():
            pool.reset()
        self.check()

    # --- what must hold after each ------------------------------------------------------------------------------

    def poison_free_pages(self) -> None:
        for pool in self.pools.values():
            for tier, pages in self.pages(pool).items():
                pages[list(self.ring.free[tier])] = POISON

    def pages(self, pool: PagePool) -> dict[str, torch.Tensor]:
        slabs = {"device": pool.memory.device_slab, "host": pool.memory.host_slab}
        return {tier: slab.view(-1, self.page_bytes) for tier, slab in slabs.items()}

    @property
    def valid_bytes(self) -> int:
        return sum(now for now, _ in self.account_bytes.values())

    def expected_stats(self) -> PoolStats:
        ring = self.ring
        wanted = {"device": ring.wanted_peak, "host": max(0, ring.wanted_peak - ring.total["device"])}
        tiers = {
            tier: TierStats(
                pages=ring.total[tier],
                in_use=ring.in_use(tier),
                peak=ring.peak[tier],
                wanted=wanted[tier],
                page_bytes=self.page_bytes,
            )
            for tier in ("device", "host")
        }
        return PoolStats(
            **tiers,
            valid_bytes=self.valid_bytes,
            valid_bytes_peak=self.valid_bytes_peak,
            spilled_bytes=ring.spilled * self.page_bytes,
            refused_groups=ring.refused,
            required=ring.required_peak,
            given_up_groups=ring.given_up,
            overflow=ring.overflow,
        )

    def check(self) -> None:
        for name, pool in self.pools.items():
            assert pool.stats() == self.expected_stats(), name
            assert pool.live_tickets == len(self.live), name
            self._check_rings(name, pool)
            for account, now_and_peak in self.account_bytes.items():
                assert pool.memory.accounts[account].tolist() == now_and_peak, (name, account)
            for entry in self.live:
                self._check_entry(name, pool, entry)

    def _check_rings(self, name: str, pool: PagePool) -> None:
        memory, pages = pool.memory, self.pages(pool)
        state = memory.state.tolist()
        assert state[Counter.WANTED] == self.ring.wanted, name
        assert state[Counter.ARRIVED] == 0, name
        for tier, ring, head, free, base in (
            ("device", memory.device_ring, Counter.DEVICE_HEAD, Counter.DEVICE_FREE, 0),
            ("host", memory.host_ring, Counter.HOST_HEAD, Counter.HOST_FREE, HOST_BASE),
        ):
            ids, expected = ring.tolist(), list(self.ring.free[tier])
            assert 0 <= state[head] < max(len(ids), 1), (name, tier)
            found = [ids[(state[head] + at) % len(ids)] - base for at in range(state[free])]
            assert found == expected, (name, tier)
            assert bool((pages[tier][expected] == POISON).all()), f"{name}: a free {tier} page was written"

    def _check_entry(self, name: str, pool: PagePool, entry: Entry) -> None:
        ticket, expected = entry.tickets[name], entry.expected
        book = ticket.group.book.tolist()
        header = book[ticket.member * HEADER : (ticket.member + 1) * HEADER]
        assert header[Header.PAGES] == expected.wanted, name
        assert header[Header.BYTES] == expected.length, name
        assert header[Header.DEVICE_PAGES] == sum(tier == "device" for tier, _ in expected.pages), name
        assert header[Header.STATUS] == (Status.GRANTED if expected.granted else Status.REFUSED), name
        if not expected.granted:
            return
        table = book[ticket.span.table : ticket.span.table + expected.wanted]
        assert table == [page + (HOST_BASE if tier == "host" else 0) for tier, page in expected.pages], name
        pages = self.pages(pool)
        for slot, (tier, page) in enumerate(expected.pages):
            part = entry.valid[slot * self.page_bytes : (slot + 1) * self.page_bytes]
            found = pages[tier][page, : part.numel()].to(part.device)
            assert torch.equal(found, part), f"{name}: page {slot} of a live ticket changed"
