"""A lower bound of the free pages, which the host knows without waiting.

The device allocates pages in the order of the compute stream. The host knows that order, so it knows which
tickets are live and the most pages that each can hold:

    most pages of a ticket = its pages             if the host knows its rows, or has read its header back
                           = pages of its capacity otherwise

    free pages >= all pages - sum over live tickets of their most pages

A group that fits this bound fits, and the bound is integer arithmetic. The first time that it does not suffice, the
pool starts to copy the headers of new tickets to pinned memory; a caller that needs more pages then waits for the
oldest headers, one after the other, until the bound suffices.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagestash.kernels.pages.layout import HEADER, Counter, Header, PoolMemory, Status
from pagestash.pages.ticket import Ticket


@dataclass(slots=True, eq=False)
class _Reading:
    """Headers that are being copied to the host."""

    tickets: list[Ticket]
    headers: torch.Tensor
    here: torch.cuda.Event | None


class Room:
    """A lower bound of the free pages of one pool."""

    def __init__(self, memory: PoolMemory) -> None:
        self.decides = False
        """Whether this step keeps tensors that find no pages. Callers that need pages then ask `denies` first."""
        self.unsure = False
        """Whether a group may have found no pages: only the overflow flag on the device tells."""
        self._memory = memory
        self._held = 0
        self._reads = False
        self._readings: deque[_Reading] = deque()

    @property
    def free(self) -> int:
        """Pages that are certainly free, in both tiers."""
        return self._memory.device_pages + self._memory.host_pages - self._held

    def pages(self, size: int) -> int:
        """Pages of `size` bytes."""
        return -(-size // self._memory.page_bytes)

    def denies(self, size: int, rows: torch.Tensor | None = None, capacity: int = 0) -> bool:
        """Whether a tensor of `size` bytes, with `rows` of its `capacity` rows valid, finds too few free pages.

        False in a step that does not keep such tensors. Waits for the device if the pool is nearly full.
        """
        if not self.decides or self.covers(self.pages(size)):
            return False
        if rows is not None:
            size = size // max(capacity, 1) * min(max(int(rows), 0), capacity)
        return self.pages(size) > self.count()

    def covers(self, pages: int) -> bool:
        """Whether `pages` are certainly free; waits for the oldest headers until they are, or none is left."""
        while self.free < pages and self._readings:
            self._take_in(self._readings.popleft())
        if self.free >= pages:
            return True
        self._reads = True
        return False

    def count(self) -> int:
        """The pages that are free after everything launched so far. Waits for the device."""
        # Both tiers in one copy, which includes the counter between them.
        values = self._memory.state[Counter.DEVICE_FREE : Counter.HOST_FREE + 1].tolist()
        return values[0] + values[-1]

    def enter(
        self, tickets: Sequence[Ticket], fixed_rows: Sequence[int], *, expendable: bool = False
    ) -> None:
        """Note tickets that are to be reserved together; -1 for rows that only the device knows.

        Before the launch: where an interrupt comes between the two, the bound is too low, and not too high.
        """
        held = 0
        for ticket, rows in zip(tickets, fixed_rows):
            span = ticket.span
            ticket.most_pages = self.pages(span.row_bytes * (span.capacity if rows < 0 else rows))
            held += ticket.most_pages
        self.unsure |= held > self.free and not expendable
        self._held += held

    def reserved(
        self, tickets: Sequence[Ticket], fixed_rows: Sequence[int], *, expendable: bool = False
    ) -> None:
        """The same tickets have been reserved: read how many pages they got, if that is worth knowing."""
        if self._reads and (expendable or -1 in fixed_rows) and any(each.most_pages for each in tickets):
            self._read(list(tickets))

    def leave(self, tickets: Sequence[Ticket]) -> None:
        """Note released tickets: later launches find their pages free."""
        for ticket in tickets:
            self._held -= ticket.most_pages
            ticket.most_pages = 0

    def _read(self, tickets: list[Ticket]) -> None:
        while self._readings and all(ticket.released for ticket in self._readings[0].tickets):
            self._readings.popleft()
        book = tickets[0].group.book[: HEADER * len(tickets)]
        if not book.is_cuda:
            self._take_in(_Reading(tickets, book, None))
        elif not torch.cuda.is_current_stream_capturing():
            headers = torch.empty(book.shape, dtype=book.dtype, pin_memory=True)
            headers.copy_(book, non_blocking=True)
            here = torch.cuda.Event()
            here.record(torch.cuda.current_stream(book.device))
            self._readings.append(_Reading(tickets, headers, here))

    def _take_in(self, reading: _Reading) -> None:
        if all(ticket.released for ticket in reading.tickets):
            return
        if reading.here is not None:
            reading.here.synchronize()
        headers = reading.headers.view(-1, HEADER).tolist()
        for ticket, header in zip(reading.tickets, headers):
            if not ticket.released:
                pages = header[Header.PAGES] if header[Header.STATUS] == Status.GRANTED else 0
                self._held += pages - ticket.most_pages
                ticket.most_pages = pages
