"""Copies between devices and the host memory of their node.

Each device copies one group at a time each way. With, for one direction,

    d    the rate of one device;  d2: its rate while its other direction is busy, too
    N    the rate of the whole node
    n    devices of the node that copy now, those that no process stands for included

a copy moves at min(d or d2, N / n). Rates change whenever a copy begins or ends.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pagestash.simulation.clock import Clock, Flag
from pagestash.simulation.costs import HostLink

Way = Literal["out", "back"]
WAYS: tuple[Way, Way] = ("out", "back")


@dataclass(slots=True)
class _Copy:
    left: float
    over: Flag
    begun: float
    rate: float = 0.0


class NodeLinks:
    """The copies of one node. `alike` says how many of its devices do what a rank does."""

    def __init__(self, clock: Clock, rates: HostLink, alike: Mapping[int, int]) -> None:
        self._clock, self._rates, self._alike = clock, rates, alike
        self._queues: dict[tuple[int, Way], deque[_Copy]] = {}
        self._settled = 0.0
        self._version = 0
        self.spans: dict[tuple[int, Way], list[tuple[float, float]]] = {}
        """When each rank copied each way."""

    def of_rank(self, rank: int) -> Callable[[Way, float], Flag]:
        """`copy` for this rank."""
        return lambda way, size: self.copy(rank, way, size)

    def copy(self, rank: int, way: Way, size: float) -> Flag:
        """Begin a copy after those that were begun before; the flag is set when it is over."""
        queue = self._queues.setdefault((rank, way), deque())
        copy = _Copy(size, Flag(), self._clock.now)
        self._settle()
        queue.append(copy)
        if len(queue) == 1:
            self._share()
        return copy.over

    def _settle(self) -> None:
        """Count what was copied since the rates were last changed."""
        passed = self._clock.now - self._settled
        self._settled = self._clock.now
        if passed:
            for queue in self._queues.values():
                if queue:
                    queue[0].left -= passed * queue[0].rate

    def _share(self) -> None:
        """Give every copy that is under way its rate, and find the next to end."""
        rates = self._rates
        first, soonest = None, float("inf")
        busy = {
            way: sum(
                self._alike.get(rank, 1)
                for (rank, own), queue in self._queues.items()
                if queue and own == way
            )
            for way in WAYS
        }
        for (rank, way), queue in self._queues.items():
            if not queue:
                continue
            other = self._queues.get((rank, "back" if way == "out" else "out"))
            own, node = (rates.out, rates.shared_out) if way == "out" else (rates.back, rates.shared_back)
            own = min(own, rates.both) if other else own
            copy = queue[0]
            copy.rate = min(own, node / busy[way])
            left = max(0.0, copy.left) / copy.rate
            if left < soonest:
                first, soonest = (rank, way), left
        self._version += 1
        if first is not None:
            version, ends = self._version, first
            self._clock.at(self._clock.now + soonest, lambda: self._end(version, ends))

    def _end(self, version: int, where: tuple[int, Way]) -> None:
        if version != self._version:
            return  # rates have changed since
        self._settle()
        queue = self._queues[where]
        copy = queue.popleft()
        self.spans.setdefault(where, []).append((copy.begun, self._clock.now))
        if queue:
            queue[0].begun = self._clock.now
        self._clock.set(copy.over)
        self._share()
