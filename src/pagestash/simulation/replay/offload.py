"""The offloaded groups of one rank in a replay, and their copies over the host link.

`Moving` does as a keeper does, whose window decides. `MovingAhead` does as Megatron-LM's fine-grained offload does:
a group leaves when its module ends and its memory is free when the copy is over; compute never waits for that. When
backward is at a group, the next group of the same name is fetched, also that of another microbatch, if it was put.
Both note the changes of device bytes, with their times, in the list of their rank.
"""

from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from itertools import pairwise

from pagestash.profiling.played_window import Change, PlayedWindow, Way
from pagestash.saved.offload.plan import Key, OffloadPlan
from pagestash.saved.offload.window import Decision, WindowGroup
from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.replay.clock import Clock, Flag, Process
from pagestash.simulation.replay.played import Span


class Copies:
    """The host link of one rank: one copy at a time each way.

    A copy has the rate of the moment in which it begins: it is lower while the other direction is in use.
    """

    def __init__(self, clock: Clock, link: HostLink) -> None:
        self._clock, self._link = clock, link
        self._waiting: dict[Way, deque[tuple[int, Flag]]] = {"out": deque(), "back": deque()}
        self.spans: list[Span] = []

    def begin(self, way: Way, size: int) -> Flag:
        """A copy after those that were begun before; the flag is set when it is over."""
        over = Flag()
        self._waiting[way].append((size, over))
        if len(self._waiting[way]) == 1:
            self._next(way)
        return over

    def _next(self, way: Way) -> None:
        size, _ = self._waiting[way][0]
        rate = self._link.out if way == "out" else self._link.back
        if all(self._waiting.values()):
            rate = min(rate, self._link.both)
        self._clock.at(self._clock.now + size / rate, partial(self._end, way, self._clock.now))

    def _end(self, way: Way, begun: float) -> None:
        _, over = self._waiting[way].popleft()
        self.spans.append(Span(way, -1, -1, begun, self._clock.now))
        self._clock.set(over)
        if self._waiting[way]:
            self._next(way)


class Moving(PlayedWindow[Flag]):
    """Puts, gets and drops of one rank, as a keeper would carry them out."""

    def __init__(
        self, plan: OffloadPlan, copies: Copies, clock: Clock, changes: list[tuple[float, int]]
    ) -> None:
        super().__init__(plan)
        self._plan, self._copies, self._clock = plan, copies, clock
        self._changes = changes
        self._host = self.host_peak = 0
        self._deciding: Flag | None = None

    def sizes(self, key: Key) -> tuple[int, int]:
        return self._plan.groups[key].device_bytes, 0

    def begin(self, way: Way, key: Key) -> Flag:
        return self._copies.begin(way, self._plan.groups[key].host_bytes)

    def is_over(self, copy: Flag) -> bool:
        return copy.time is not None

    def changed(self, what: Change, group: WindowGroup) -> None:
        size = 0
        if group.away_bytes and what in ("put", "dropped"):
            self._host += (1 if what == "put" else -1) * self._plan.groups[group.key].host_bytes
            self.host_peak = max(self.host_peak, self._host)
        if what == "fetched":
            size = group.away_bytes
        elif what == "left" or (what == "dropped" and (group.fetched or not group.away_bytes)):
            size = -self._plan.groups[group.key].device_bytes
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


class MovingAhead:
    """Groups leave without a window, and return one ahead of each name."""

    def __init__(
        self, plan: OffloadPlan, copies: Copies, clock: Clock, changes: list[tuple[float, int]]
    ) -> None:
        self._groups, self._copies, self._clock = plan.groups, copies, clock
        self._changes = changes
        asked: dict[str, list[Key]] = {}
        for kind, key in plan.order:
            if kind == "get":  # `3.rows` and `4.rows` have the same name
                asked.setdefault(str(key[2]).partition(".")[2], []).append(key)
        self._next = {key: after for own in asked.values() for key, after in pairwise(own)}
        self._gone: dict[Key, Flag] = {}
        self._here: dict[Key, Flag] = {}
        self._host = self.host_peak = 0

    def put(self, key: Key) -> Process:
        self._gone[key] = self._copies.begin("out", self._groups[key].host_bytes)
        self._host += self._groups[key].host_bytes
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
        self._host -= self._groups[key].host_bytes
        self._change(-self._groups[key].device_bytes)

    def _fetch(self, key: Key) -> None:
        if key not in self._here:
            self._here[key] = Flag()
            self._clock.start(self._return(key))

    def _leave(self, key: Key) -> Process:
        yield self._gone[key]
        self._change(-self._groups[key].device_bytes)

    def _return(self, key: Key) -> Process:
        yield self._gone[key]
        self._change(self._groups[key].device_bytes)
        yield self._copies.begin("back", self._groups[key].host_bytes)
        self._clock.set(self._here[key])

    def _change(self, size: int) -> None:
        self._changes.append((self._clock.now, size))
