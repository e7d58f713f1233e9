"""The `stash` home: it measures how many pages a step needs, then has a pool of that size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from pagestash.kernels.pages.layout import Counter
from pagestash.pages.pool import PagePool
from pagestash.pages.ticket import Ticket
from pagestash.policy import HomeName, Policy
from pagestash.saved.home import Home, HomeStats, Keep, Tally
from pagestash.saved.overflow import NoPage, make_room
from pagestash.saved.paged import PagedStash
from pagestash.saved.storage import Entry, Place
from pagestash.saved.streams import capturing


class StashPlace(Place, Protocol):
    """A place of this home, which can also restore to memory of the caller's."""

    def restore_into(self, entry: Entry, buffer: torch.Tensor) -> None:
        """Write the entry to `buffer`, which has its shape."""
        ...


@dataclass(slots=True, eq=False)
class ExactCopy:
    """The place of an entry before there is a pool: its valid bytes."""

    copies: "ExactCopies"
    copy: torch.Tensor

    def get(self, entry: Entry) -> torch.Tensor:
        flat = torch.zeros(entry.length, dtype=torch.uint8, device=self.copy.device)
        flat[: self.copy.numel()].copy_(self.copy)
        return flat

    def restore_into(self, entry: Entry, buffer: torch.Tensor) -> None:
        buffer.view(-1).copy_(self.get(entry))

    def drop(self, entry: Entry) -> None:
        self.copies.count(entry.region, self.copy.nbytes, -1)
        entry.place = None


class ExactCopies:
    """Copies valid rows exactly, by asking the device for the row count, and counts the pages they would take.

    It waits for the device at every group, so only the first steps use it.
    """

    def __init__(self, page_bytes: int, tally: Tally) -> None:
        self.groups = 0
        self.pages = 0
        self.peak_pages = 0
        self.left, self.left_before = 0, 0
        """Pages of what waited when the last step was over, and the one before. If a module keeps a result with its
        graph, which is in no loss, it waits in each step."""
        self._page_bytes = page_bytes
        self._tally = tally

    def put(self, group: Sequence[Entry]) -> None:
        self.groups += 1
        for entry in group:
            copy = entry.source().view(-1)[: entry.valid_bytes()].clone()
            entry.place = ExactCopy(self, copy)
            entry.origin = None
            self.count(entry.region, copy.nbytes, 1)

    def count(self, region: str, size: int, sign: int) -> None:
        self.pages += sign * -(-size // self._page_bytes)
        self.peak_pages = max(self.peak_pages, self.pages)
        self._tally.count(region, sign * size)


class Stash(Home):
    """Puts valid rows into pages; exact copies in the first step, from which the pool's size is taken."""

    name: HomeName = "stash"

    def __init__(self, policy: Policy, keep: Keep, backend: str) -> None:
        super().__init__()
        self._policy = policy
        self._keep = keep
        self._backend = backend
        self._copies = ExactCopies(policy.pool.page_bytes, self.tally)
        self._paged: PagedStash | None = None
        self._earlier_leases: set[Ticket] = set()
        self.keep_unpaged = False
        """Whether the next step keeps groups that find no page, where the policy says so; else they overflow."""

    @property
    def pool(self) -> PagePool | None:
        """The pool, or None while its size is not known."""
        return None if self._paged is None else self._paged.pool

    @property
    def groups(self) -> int:
        """Groups that were stashed so far; does not wait for the device."""
        return self._copies.groups if self._paged is None else self._paged.pool.reservations

    @property
    def no_page(self) -> NoPage | None:
        """What found no page; None while there is no pool."""
        return None if self._paged is None else self._paged.no_page

    @property
    def live(self) -> bool:
        return self._copies.pages > 0 if self._paged is None else self._paged.live

    def account(self, region: str) -> int:
        """The row of the pool's accounts that counts the bytes of `region`."""
        assert self._paged is not None
        return self._paged.account(region)

    # --- a step ---

    def start(self) -> None:
        if self._paged is None:
            return
        self.tally.reset_peak()  # what was measured counts until now
        pool, keeps = self._paged.pool, self._policy.pool.on_overflow == "keep"
        pool.room.decides = self.keep_unpaged and keeps and not capturing()
        self._earlier_leases = set(pool.leases)

    def put(self, group: Sequence[Entry]) -> None:
        if self._paged is None:
            self._copies.put(group)
        else:
            self._paged.put(group)

    def take(self, entry: Entry) -> StashPlace:
        """Put one entry, and say where it is."""
        self.put([entry])
        return cast(StashPlace, entry.place)

    def give_up(self) -> None:
        if self._paged is None:
            return
        self._paged.no_page.take_peak()  # no reason to grow: the pool has forgotten what the step wanted
        pool = self._paged.pool
        for ticket in pool.leases - self._earlier_leases:
            pool.release_later(ticket)
        if capturing():  # what was reserved in it never happened on the device
            pool.discard()

    def settle(self) -> None:
        if self._paged is not None:
            self._paged.pool.room.decides = False
            self._paged.settle()

    def commit(self) -> None:
        if self._paged is None:
            self._copies.left_before, self._copies.left = self._copies.left, self._copies.pages
        else:
            make_room(self._paged.pool, self._policy.pool.headroom, self._paged.no_page)

    # --- the pool ---

    def measure(self) -> None:
        """The next step is measured, as the first one is."""
        self._paged = None
        self.tally = Tally()
        self._copies = ExactCopies(self._policy.pool.page_bytes, self.tally)

    def pages_wanted(self, others: int | None) -> int | None:
        """Device pages that the pool should have; None while that is not known.

        `others` is what other homes will put into pages, None if that is not known yet.
        """
        config = self._policy.pool
        if config.device_bytes is not None:
            return -(-config.device_bytes // config.page_bytes)
        if self._copies.pages > self._copies.left_before or others is None:
            return None
        return math.ceil((self._copies.peak_pages + others) * config.headroom) or None

    def make_pool(self, device: torch.device, pages: int) -> None:
        """From here on groups go into a pool of so many device pages."""
        pool = PagePool(
            device,
            self._policy.pool.page_bytes,
            device_pages=pages,
            host_bytes=self._policy.spill_bytes,
            backend=self._backend,
        )
        self._paged = PagedStash(pool, self._keep)

    # --- counts ---

    def held(self) -> int | torch.Tensor:
        pool = self.pool
        return self.tally.bytes if pool is None else pool.memory.state[Counter.BYTES].clone()

    def reset_peaks(self) -> None:
        self.tally.reset_peak()
        if self._paged is not None:
            self._paged.no_page.reset_peak()
            self._paged.pool.reset()

    def stats(self) -> HomeStats:
        if self._paged is None:
            return super().stats()
        self._paged.flush()
        state = self._paged.pool.stats()
        return HomeStats(state.valid_bytes, max(state.valid_bytes_peak, self.tally.peak))

    def regions(self) -> dict[str, HomeStats]:
        if self._paged is None:
            return super().regions()
        counts, accounts = self._paged.pool.memory.accounts.tolist(), self._paged.accounts
        found = {name: HomeStats(*counts[row]) for name, row in accounts.items()}
        for name, measured in self.tally.by_region.items():
            known = found.get(name, HomeStats(0, 0))
            found[name] = HomeStats(known.bytes, max(known.peak, measured[1]))
        return found
