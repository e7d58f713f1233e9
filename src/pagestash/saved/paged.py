"""The `stash` home once there is a pool: a region's valid rows wait in the pool's pages.

Device pages are written and read inline on the compute stream: at 4 TB/s there is nothing to hide. What spills
to host pages goes over PCIe, a hundred times slower, and runs on two side streams beside compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagestash.kernels.pages.layout import ACCOUNTS
from pagestash.pages.pool import PagePool
from pagestash.pages.ticket import Ticket
from pagestash.saved.home import Keep
from pagestash.saved.overflow import NoPage
from pagestash.saved.storage import Entry
from pagestash.saved.streams import SideStream, wait_here


@dataclass(slots=True, eq=False)
class StashedGroup:
    """The entries of one region in one microbatch: being written to pages, in pages, or being read back."""

    stash: "PagedStash | None" = field(repr=False)
    """None once all entries are dropped: the stash has a list of its groups, and a circle would keep the pool."""
    tickets: dict[Entry, Ticket]
    """Of entries that are not dropped. Another thread may drop one at any time: copy this before a loop."""
    spilled: torch.cuda.Event | None = None
    incoming: dict[Entry, torch.Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None
    restored: dict[Entry, torch.Tensor] = field(default_factory=dict)

    def get(self, entry: Entry) -> torch.Tensor:
        assert self.stash is not None
        return self.stash.get(self, entry)

    def drop(self, entry: Entry) -> None:
        stash = self.stash
        assert stash is not None
        entry.place = None
        self.restored.pop(entry, None)
        # Not released here: this may run in any thread, on any stream. `flush` does it in the order of compute.
        ticket = self.tickets.pop(entry)
        # (None: another thread has dropped the last one meanwhile.)
        if not self.tickets and self.stash is not None:
            self.stash = None
            stash.ended(self, ticket)
        stash.pool.release_later(ticket)

    def restore_into(self, entry: Entry, buffer: torch.Tensor) -> None:
        assert self.stash is not None
        self.stash.restore_into(self, entry, buffer)


class PagedStash:
    """Stashes a group with one reservation when its region ends; restores it whole when backward asks."""

    def __init__(self, pool: PagePool, keep: Keep) -> None:
        self.pool = pool
        self.no_page = NoPage(keep)
        self.accounts: dict[str, int] = {}
        self._spills = pool.host_pages > 0
        self._out = SideStream(pool.device)
        self._in = SideStream(pool.device)
        self._groups: list[StashedGroup] = []  # in the order of forward; backward asks from the end
        self._leaving: tuple[torch.cuda.Event | None, list[tuple[Entry, torch.Tensor]]] | None = None

    def put(self, group: Sequence[Entry]) -> None:
        counts = dict.fromkeys(id(entry.rows) for entry in group if entry.rows is not None)
        if len(counts) > 1:  # one reservation reads one row count
            for count in counts:
                self._put([entry for entry in group if id(entry.rows) == count])
            group = [entry for entry in group if entry.rows is None]
        if group:
            self._put(group)

    def _put(self, group: Sequence[Entry]) -> None:
        self.flush()
        self._retire()
        wanted = self._pages_denied(group)
        if wanted is not None:
            self.no_page.put(group, wanted)
            return
        sources = [entry.source() for entry in group]
        tickets = self.pool.stash(
            sources,
            rows=[entry.rows for entry in group],
            account=self.account(group[0].region),
            host_later=self._spills,
        )
        stashed = StashedGroup(self, dict(zip(group, tickets)))
        if self._spills:
            # After the stash (it decides which pages are on the host, and writes the book that spill reads).
            with self._out.after():
                self.pool.spill(tickets, sources)
            stashed.spilled = self._out.mark()
            self._leaving = (
                stashed.spilled,
                [(entry, entry.origin) for entry in group if entry.origin is not None],
            )
        for entry in group:
            entry.place = stashed
            entry.origin = None
        self._groups.append(stashed)

    def _pages_denied(self, group: Sequence[Entry]) -> list[int] | None:
        """The pages that each entry needs, if the step keeps groups without pages and this is one; else None."""
        room = self.pool.room
        if not room.decides or room.covers(sum(room.pages(entry.length) for entry in group)):
            return None
        # The pool is nearly full: count exactly, which waits for the device.
        wanted = [room.pages(entry.valid_bytes()) for entry in group]
        return wanted if sum(wanted) > room.count() else None

    def get(self, group: StashedGroup, entry: Entry) -> torch.Tensor:
        self.flush()
        self._retire()  # which sets `spoiled` if a source was changed during its spill
        if entry not in group.restored:
            self._restore(group, entry)
            self._prefetch_before(group)
        flat = group.restored[entry]
        if not entry.waiting:
            # Every handle has asked for it. One that asks again (retain_graph, split backward) restores it again.
            del group.restored[entry]
        return flat.view(-1)

    def restore_into(self, group: StashedGroup, entry: Entry, buffer: torch.Tensor) -> None:
        """Restore one entry into `buffer`, which has the entry's shape."""
        self.flush()
        wait_here(group.spilled)
        self.pool.restore_into([group.tickets[entry]], [buffer])

    def ended(self, group: StashedGroup, last: Ticket) -> None:
        """All entries of a group are dropped, in any thread. If the stash ends, too, nobody will `flush`."""
        # Nobody asked for what is incoming, and its copy, which reads the book, may still be under way.
        if group.incoming:
            self._in.outlive([*group.incoming.values(), last.group.book])

    def flush(self) -> None:
        """Give back the pages of dropped entries, on the current stream.

        Every launch that reads those pages was put on this stream before, or waited for by it.
        """
        self.pool.flush()
        ended = {group for group in self._groups if not group.tickets}
        if not ended:
            return
        for group in ended:
            # A prefetch that nobody asked for may still be writing to its buffers: they must outlive it.
            wait_here(group.arrived)
            group.incoming.clear()
        self._groups = [group for group in self._groups if group not in ended]

    def settle(self) -> None:
        """End of a step: the current stream waits for both side streams, and pages of dropped entries are free."""
        self._retire()
        self.flush()
        self._out.join()
        self._in.join()

    @property
    def live(self) -> bool:
        """Whether a backward is still to come."""
        self.flush()
        return self.pool.live_tickets > 0

    def account(self, region: str) -> int:
        """The row of the pool's accounts that counts the bytes of `region`."""
        return self.accounts.setdefault(region, min(len(self.accounts), ACCOUNTS - 1))

    def _retire(self) -> None:
        """Free the buffers that the last spill reads, after the compute stream was told to wait for it.

        The allocator gives freed memory to the next operation of the compute stream; that operation then
        comes after the spill. Waiting at the next group, not at once, is what lets the spill run beside
        compute.
        """
        if self._leaving is not None:
            for entry, origin in self._leaving[1]:
                # It was changed while the spill may have been reading it.
                entry.spoiled |= origin._version != entry.version
            wait_here(self._leaving[0])
            self._leaving = None

    def _restore(self, group: StashedGroup, asked: Entry) -> None:
        """Restore the asked entry, and in the same launch those of its group that are still to be asked for."""
        known = group.tickets.copy()
        if asked in group.incoming:
            # Its host pages were prefetched: the compute stream waits for them, and reads the device pages.
            wait_here(group.arrived)
            group.restored |= group.incoming
            here = [entry for entry in group.incoming if entry in known]
            buffers = [group.incoming[entry] for entry in here]
            group.incoming = {}
            self.pool.restore_into([known[entry] for entry in here], buffers, tiers="device")
        else:
            wait_here(group.spilled)  # host pages are read only after they were written
            entries = [e for e in known if e is asked or (e.waiting and e not in group.restored)]
            buffers = self.pool.restore([known[entry] for entry in entries])
            group.restored |= dict(zip(entries, buffers))

    def _prefetch_before(self, group: StashedGroup) -> None:
        """Prefetch the host pages of the group that backward asks for next, beside this one's compute."""
        if not self._spills:
            return
        before = self._groups[: self._groups.index(group)]
        waiting = (group for group in reversed(before) if any(e.waiting for e in group.tickets.copy()))
        upcoming = next(waiting, None)
        if upcoming is None or upcoming.restored or upcoming.incoming:
            return
        tickets = {entry: ticket for entry, ticket in upcoming.tickets.copy().items() if entry.waiting}
        buffers = self.pool.buffers(list(tickets.values()))
        # After all work of the compute stream so far, which may still use the memory of the buffers, and after
        # the spill that wrote the pages. The compute stream touches the buffers only after `arrived`.
        with self._in.after(upcoming.spilled):
            self.pool.restore_into(list(tickets.values()), buffers, tiers="host")
        upcoming.arrived = self._in.mark()
        upcoming.incoming = dict(zip(tickets, buffers))
