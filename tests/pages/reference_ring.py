"""The allocator in plain Python, one page at a time: the specification of the kernels' rings and counters.

It moves no bytes. Tests run the same operations on it and on a `PagePool` and compare every number.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReferenceTicket:
    """The pages of one tensor, in order; `granted` is False for a group that did not fit."""

    granted: bool
    wanted: int
    length: int
    required: int
    pages: list[tuple[str, int]] = field(default_factory=list)


class ReferenceRing:
    """Free pages of two tiers, first in first out; a group takes device pages first, all or nothing."""

    def __init__(self, page_bytes: int, device_pages: int, host_pages: int = 0) -> None:
        self.page_bytes = page_bytes
        self.total = {"device": device_pages, "host": host_pages}
        self.free = {tier: deque(range(count)) for tier, count in self.total.items()}
        self.peak = {"device": 0, "host": 0}
        self.wanted = 0
        self.wanted_peak = 0
        self.spilled = 0
        self.refused = 0
        self.required = 0
        self.required_peak = 0
        self.given_up = 0
        self.overflow = False

    def in_use(self, tier: str) -> int:
        return self.total[tier] - len(self.free[tier])

    def reserve(self, lengths: Sequence[int], expendable: bool = False) -> list[ReferenceTicket]:
        """Take pages for tensors of `lengths` valid bytes, for all of them or none."""
        counts = [-(-length // self.page_bytes) for length in lengths]
        wanted = sum(counts)
        self.wanted += wanted
        self.wanted_peak = max(self.wanted_peak, self.wanted)
        if expendable:
            held_back = self.required_peak - self.required
            granted = wanted <= len(self.free["device"]) - held_back
            self.given_up += not granted
        else:
            granted = wanted <= len(self.free["device"]) + len(self.free["host"])
            self.overflow |= not granted
            self.refused += not granted
            self.required += wanted
            self.required_peak = max(self.required_peak, self.required)
        tickets = []
        for length, count in zip(lengths, counts):
            ticket = ReferenceTicket(granted, count, length, required=0 if expendable else count)
            for _ in range(count if granted else 0):
                tier = "device" if self.free["device"] else "host"
                ticket.pages.append((tier, self.free[tier].popleft()))
                self.spilled += tier == "host"
            tickets.append(ticket)
        for tier in self.peak:
            self.peak[tier] = max(self.peak[tier], self.in_use(tier))
        return tickets

    def release(self, tickets: Sequence[ReferenceTicket]) -> None:
        """Append the tickets' pages to the free lists; a second release changes nothing."""
        for ticket in tickets:
            for tier, page in ticket.pages:
                self.free[tier].append(page)
            self.wanted -= ticket.wanted
            self.required -= ticket.required
            ticket.pages, ticket.wanted, ticket.required = [], 0, 0

    def grow(self, device_pages: int, host_pages: int) -> None:
        """Add pages up to the given totals; new pages are used before the old free ones."""
        for tier, count in (("device", device_pages), ("host", host_pages)):
            self.free[tier].extendleft(reversed(range(self.total[tier], count)))
            self.total[tier] = count

    def reset(self) -> None:
        """Clear the overflow and restart peaks at what is in use now."""
        self.overflow = False
        self.peak = {tier: self.in_use(tier) for tier in self.peak}
        self.wanted_peak = self.wanted
        self.spilled = self.refused = self.given_up = 0
