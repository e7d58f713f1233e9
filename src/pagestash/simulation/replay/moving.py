"""The offloaded groups of one rank in a replay.

`Moving` does as a keeper does, whose window decides. `MovingAhead` does as Megatron-LM's fine-grained offload does:
a group leaves when its module ends and its memory is free when the copy is over; compute never waits for that. When
backward is at a group, the next group of the same name is fetched, also that of another microbatch, if it was put.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import pairwise
from typing import Protocol

from pagestash.profiling.played_window import Change, PlayedWindow
from pagestash.saved.offload.plan import Key, OffloadPlan
from pagestash.saved.offload.window import Decision, WindowGroup
from pagestash.simulation.replay.clock import Clock, Flag, Process
from pagestash.simulation.replay.links import Way
from pagestash.simulation.replay.programs import MovedGroup

Copy = Callable[[Way, float], Flag]
"""Begins a copy of so many bytes; the flag is set when it is over."""


class Offloading(Protocol):
    """Puts, gets and drops of one rank."""

    host_peak: int
    """The most bytes on the host at one time."""

    def put(self, key: Key) -> Process:
        """The group's region has ended."""
        ...

    def get(self, key: Key) -> Process:
        """Backward asks for something of the group."""
        ...

    def drop(self, key: Key) -> None:
        """Backward is done with the group."""
        ...


class Moving(PlayedWindow[Flag]):
    """Puts, gets and drops of one rank, as a keeper would carry them out. Changes of device bytes are noted."""

    def __init__(
        self,
        plan: OffloadPlan,
        groups: Mapping[Key, MovedGroup],
        copy: Copy,
        clock: Clock,
        changes: list[tuple[float, int]],
    ) -> None:
        super().__init__(plan)
        self._plan, self._moved, self._copy, self._clock = plan, groups, copy, clock
        self._changes = changes
        self._host = self.host_peak = 0
        self._deciding: Flag | None = None

    def sizes(self, key: Key) -> tuple[int, int]:
        return self._plan.groups[key].device_bytes, self._moved[key].kept_bytes

    def begin(self, way: Way, key: Key) -> Flag:
        return self._copy(way, self._moved[key].moved_bytes)

    def is_over(self, copy: Flag) -> bool:
        return copy.time is not None

    def changed(self, what: Change, group: WindowGroup) -> None:
        moved, size = self._moved[group.key], 0
        freed = moved.device_bytes if moved.freed_bytes is None else moved.freed_bytes
        if group.away_bytes and what in ("put", "dropped"):
            self._host += (1 if what == "put" else -1) * self._plan.groups[group.key].host_bytes
            self.host_peak = max(self.host_peak, self._host)
        if what == "fetched":
            size = group.away_bytes
        elif what == "left" or (what == "dropped" and not group.away_bytes):
            size = -freed
        elif what == "dropped" and group.fetched:
            size = -group.device_bytes
        if size:
            self._changes.append((self._clock.now, size))

    def carry_out(self, decisions: Iterator[Decision]) -> Generator[Flag]:
        # Two actions may run side by side: a host thread would carry out the decisions of one before the other's.
        while self._deciding is not None:
            yield self._deciding
        self._deciding = done = Flag()
        yield from super().carry_out(decisions)
        self._deciding = None
        self._clock.set(done)


def name_of(key: Key) -> str:
    """The name that groups of all layers and microbatches share: `3.rows` is one of `rows`."""
    return str(key[2]).partition(".")[2]


class MovingAhead:
    """Groups leave without a window, and return one ahead of each name."""

    def __init__(
        self,
        plan: OffloadPlan,
        groups: Mapping[Key, MovedGroup],
        copy: Copy,
        clock: Clock,
        changes: list[tuple[float, int]],
    ) -> None:
        self._plan, self._groups, self._copy, self._clock = plan, groups, copy, clock
        self._changes = changes
        asked: dict[str, list[Key]] = {}
        for kind, key in plan.order:
            if kind == "get":
                asked.setdefault(name_of(key), []).append(key)
        self._next = {key: after for own in asked.values() for key, after in pairwise(own)}
        self._gone: dict[Key, Flag] = {}
        self._here: dict[Key, Flag] = {}
        self._host = self.host_peak = 0

    def put(self, key: Key) -> Process:
        self._gone[key] = self._copy("out", self._groups[key].moved_bytes)
        self._host += self._plan.groups[key].host_bytes
        self.host_peak = max(self.host_peak, self._host)
        self._clock.start(self._leave(key))
        yield from ()

    def get(self, key: Key) -> Process:
        self._fetch(key)
        yield self._here[key]
        following = self._next.get(key)
        if following in self._gone:
            self._fetch(following)

    def drop(self, key: Key) -> None:
        self._host -= self._plan.groups[key].host_bytes
        self._change(-self._plan.groups[key].device_bytes)

    def _fetch(self, key: Key) -> None:
        if key not in self._here:
            self._here[key] = Flag()
            self._clock.start(self._return(key))

    def _leave(self, key: Key) -> Process:
        yield self._gone[key]
        self._change(-self._plan.groups[key].device_bytes)

    def _return(self, key: Key) -> Process:
        yield self._gone[key]
        self._change(self._plan.groups[key].device_bytes)
        yield self._copy("back", self._groups[key].moved_bytes)
        self._clock.set(self._here[key])

    def _change(self, size: int) -> None:
        self._changes.append((self._clock.now, size))
