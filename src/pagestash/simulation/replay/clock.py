"""Processes in simulated time.

A process is a generator. It yields a time to be resumed at, or a `Flag` to be resumed when that is set. Processes
of the same moment run in the order in which they asked. An *event* is one entry of the queue: the cost of a
simulation is in proportion to their number, but for the logarithm of the queue's length.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush


class Flag:
    """Something that happens once."""

    __slots__ = ("time", "waiting")

    def __init__(self) -> None:
        self.time: float | None = None
        """When it happened."""
        self.waiting: list[Process] = []


Process = Generator[float | Flag, None, None]


class Clock:
    """Runs processes in the order of simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call this at that time."""
        self._number += 1
        heappush(self._queue, (time, self._number, call))

    def start(self, process: Process) -> None:
        """Begin a process now."""
        self._resume(process)

    def set(self, flag: Flag) -> None:
        """The flag's event happens now."""
        flag.time = self.now
        for process in flag.waiting:
            self._later(self.now, process)
        flag.waiting.clear()

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            self.now, _, call = heappop(self._queue)
            self.events += 1
            call()

    def _later(self, time: float, process: Process) -> None:
        self.at(time, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        for wanted in process:
            if not isinstance(wanted, Flag):
                if wanted > self.now:
                    self._later(wanted, process)
                    return
            elif wanted.time is None:
                wanted.waiting.append(process)
                return
