"""Copies between devices and the host memory of their node.

Each device copies one group at a time each way. With, for one direction,

    d    the rate of one device;  d2: its rate while its other direction is busy, too
    N    the rate of the whole node
    n    devices of the node that copy now, those that no process stands for included

a copy moves at min(d or d2, N / n). Rates change whenever a copy begins or ends.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.replay.clock import Clock, Flag

Way = Literal["out", "back"]
WAYS: tuple[Way, Way] = ("out", "back")


@dataclass(slots=True)
class _Copy:
    left: float
    over: Flag
    begun: float
    rate: float = 0.0


@dataclass(slots=True)
class _Lane:
    """The copies of one rank in one direction, that under way first."""

    alike: int
    """Devices of the node that copy when this rank does."""
    out: bool
    alone: float
    """Its rate while the other direction is idle."""
    both: float
    copies: deque[_Copy] = field(default_factory=deque)
    other: deque[_Copy] = field(default_factory=deque)
    """The copies of its other direction."""
    spans: list[tuple[float, float]] = field(default_factory=list)


class NodeLinks:
    """The copies of one node. `alike` says how many of its devices do what a rank does."""

    def __init__(self, clock: Clock, rates: HostLink, alike: Mapping[int, int]) -> None:
        self._clock, self._rates, self._alike = clock, rates, alike
        self._lanes: dict[tuple[int, Way], _Lane] = {}
        self._settled = 0.0
        self._version = 0

    def of_rank(self, rank: int) -> Callable[[Way, float], Flag]:
        """`copy` for this rank."""
        return lambda way, size: self.copy(rank, way, size)

    def spans(self, rank: int, way: Way) -> list[tuple[float, float]]:
        """When the rank copied that way."""
        lane = self._lanes.get((rank, way))
        return [] if lane is None else lane.spans

    def copy(self, rank: int, way: Way, size: float) -> Flag:
        """Begin a copy after those that were begun before; the flag is set when it is over."""
        lane = self._lanes.get((rank, way)) or self._new_lane(rank, way)
        copy = _Copy(size, Flag(), self._clock.now)
        lane.copies.append(copy)
        if len(lane.copies) == 1:
            self._settle()
            self._share()
        return copy.over

    def _new_lane(self, rank: int, way: Way) -> _Lane:
        rates = self._rates
        alone = rates.out if way == "out" else rates.back
        lane = _Lane(self._alike.get(rank, 1), way == "out", alone, min(alone, rates.both))
        other = self._lanes.get((rank, "back" if way == "out" else "out"))
        if other is not None:
            lane.other, other.other = other.copies, lane.copies
        self._lanes[rank, way] = lane
        return lane

    def _settle(self) -> None:
        """Count what was copied since the rates were last changed."""
        passed = self._clock.now - self._settled
        self._settled = self._clock.now
        if passed:
            for lane in self._lanes.values():
                if lane.copies:
                    lane.copies[0].left -= passed * lane.copies[0].rate

    def _share(self) -> None:
        """Give every copy that is under way its rate, and find the next to end."""
        out = back = 0
        busy = [lane for lane in self._lanes.values() if lane.copies]
        for lane in busy:
            if lane.out:
                out += lane.alike
            else:
                back += lane.alike
        share_out, share_back = self._rates.shared_out / (out or 1), self._rates.shared_back / (back or 1)
        first, soonest = None, float("inf")
        for lane in busy:
            copy = lane.copies[0]
            own, share = lane.both if lane.other else lane.alone, share_out if lane.out else share_back
            copy.rate = own if own < share else share
            left = copy.left / copy.rate if copy.left > 0 else 0.0
            if left < soonest:
                first, soonest = lane, left
        self._version += 1
        if first is not None:
            self._clock.at(self._clock.now + soonest, partial(self._end, self._version, first))

    def _end(self, version: int, lane: _Lane) -> None:
        if version != self._version:
            return  # rates have changed since
        self._settle()
        copy = lane.copies.popleft()
        lane.spans.append((copy.begun, self._clock.now))
        if lane.copies:
            lane.copies[0].begun = self._clock.now
        self._clock.set(copy.over)
        self._share()
