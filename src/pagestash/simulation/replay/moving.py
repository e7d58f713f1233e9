"""The offloaded groups of one rank in a replay.

`Moving` does as a keeper does: its window decides, this module keeps the time. `MovingAhead` does as Megatron-LM's
fine-grained offload does: a group leaves when its module ends and its memory is free when the copy is over; compute
never waits for that. When backward is at a group, the next group of the same name is fetched, also that of another
microbatch, if it has been put.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Protocol

from pagestash.saved.offload.plan import Key, OffloadPlan
from pagestash.saved.offload.window import Decision, Window, WindowGroup
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


class Moving:
    """Puts, gets and drops of one rank, as a keeper would carry them out. Changes of device bytes are noted."""

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
        self._window = Window(plan)
        self._held: dict[Key, WindowGroup] = {}
        self._gone: dict[Key, Flag] = {}
        self._here: dict[Key, Flag] = {}
        self._leaving: deque[WindowGroup] = deque()
        self._host = self.host_peak = 0
        self._deciding: Flag | None = None

    def put(self, key: Key) -> Process:
        """The group's region has ended."""
        size, kept = self._plan.groups[key].device_bytes, self._groups[key].kept_bytes
        if self._window.stays(key):
            group = WindowGroup(key, size, kept_bytes=size + kept)
        else:
            group = WindowGroup(
                key, size, away_bytes=size, travelling_bytes=size, kept_bytes=kept, leaving_bytes=size
            )
            self._gone[key] = self._copy("out", self._groups[key].moved_bytes)
            self._leaving.append(group)
            self._host += self._plan.groups[key].host_bytes
            self.host_peak = max(self.host_peak, self._host)
        self._held[key] = group
        self._window.put(group)
        yield from self._carry_out(self._window.after_put(group))

    def get(self, key: Key) -> Process:
        """Backward asks for something of the group."""
        group = self._held[key]
        yield from self._carry_out(self._window.get(group, kept=not group.away_bytes))

    def drop(self, key: Key) -> None:
        """Backward is done with the group."""
        group = self._held.pop(key)
        self._window.drop(group)
        away = group.away_bytes if key in self._gone else 0
        self._host -= self._plan.groups[key].host_bytes if away else 0
        if group.fetched:
            self._change(-group.device_bytes)
        elif not away:
            self._change(-self._freed(key))

    def _change(self, size: int) -> None:
        self._changes.append((self._clock.now, size))

    def _see_what_has_left(self) -> None:
        while self._leaving and self._gone[self._leaving[0].key].time is not None:
            self._left()
            self._window.gone()

    def _left(self) -> WindowGroup:
        """The oldest copy out is over, and its source is freed."""
        group = self._leaving.popleft()
        self._change(-self._freed(group.key))
        return group

    def _freed(self, key: Key) -> int:
        """Bytes of the device that are the group's alone, until it leaves."""
        freed = self._groups[key].freed_bytes
        return self._groups[key].device_bytes if freed is None else freed

    def _carry_out(self, decisions: Iterator[Decision]) -> Process:
        # Two actions may run side by side: a host thread would carry out the decisions of one before the other's.
        while self._deciding is not None:
            yield self._deciding
        self._deciding = done = Flag()
        self._see_what_has_left()
        yield from self._decided(decisions)
        self._deciding = None
        self._clock.set(done)

    def _decided(self, decisions: Iterator[Decision]) -> Process:
        for what, group in decisions:
            if what == "let go":
                yield self._gone[self._leaving[0].key]
                self._left()
            elif what == "fetch":
                self._here[group.key] = self._copy("back", self._groups[group.key].moved_bytes)
                self._change(group.away_bytes)
            else:
                yield self._here[group.key]


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
