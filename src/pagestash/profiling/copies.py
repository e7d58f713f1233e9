"""The copies of a policy's offload, on the timeline of a measured step.

The step is simulated by the keeper's own rules: its plan (`saved/offload/plan.py`) decides which groups stay,
its window (`saved/offload/window.py`) what leaves and what is fetched at which event. Only time is modelled
here: compute takes its measured time, the link moves one copy at a time in each direction, and compute waits
when the window says so. `Profile.fits` asks how long compute waits; a plan also where the bytes are meanwhile.

A keeper may differ from this in what a profile does not know, the headroom: where memory is far below its peak, a
keeper lets copies out take longer, so it waits no longer. A keeper may also see that a copy out is over, and when
depends on the link. While a graph is captured it never does, nor where the host is ahead of the device
(`sees_copies`).
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Literal

from pagestash.profiling.groups import Move
from pagestash.profiling.link import Link
from pagestash.profiling.played_window import Change, PlayedWindow, Way
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, make_plan
from pagestash.saved.offload.window import WindowGroup


def plan_of(moves: Sequence[Move], at_once: Container[Key] = ()) -> OffloadPlan:
    """The keeper's plan. Groups at a position in `at_once`, whose backward follows its forward, stay."""
    groups = {move.key: GroupBytes(move.bytes, move.device_bytes, move.window) for move in moves}
    found: list[tuple[int, int, Event]] = [(move.put_at, 0, ("put", move.key)) for move in moves]
    # (What nobody asks for is let go before the last segment, in which a profile says that it is asked for.)
    found += [
        (move.asked_at[0], 1, ("get", move.key))
        for move in as_asked(moves)
        if move.asked_at[0] < move.dropped_at
    ]
    found.sort(key=lambda item: item[:2])
    return make_plan([event for _, _, event in found], groups, at_once)


def as_asked(moves: Sequence[Move]) -> list[Move]:
    """In the order in which they are asked for at one time.

    Without numbers of requests: what a region saved itself before what was claimed.
    """
    first = {(*move.key[:-1], move.put_at): index for index, move in reversed(list(enumerate(moves)))}
    return sorted(moves, key=lambda move: (move.request, first[*move.key[:-1], move.put_at], not move.own))


@dataclass(slots=True)
class Played:
    """What became of the copies of one step. A moment is given as the segment that begins then."""

    waited: float = 0.0
    """Seconds that compute waits."""
    waits: list[tuple[int, float]] = field(default_factory=list)
    """When, and for how long."""
    changes: list[tuple[int, Change, Key]] = field(default_factory=list)
    """When a group was put, when its memory on the device was free, when it was fetched, and dropped."""
    out_seconds: float = 0.0
    back_seconds: float = 0.0
    """How long the link is busy each way."""


def play(
    moves: Sequence[Move],
    plan: OffloadPlan,
    seconds: Sequence[float],
    link: Link,
    *,
    sees_copies: bool = True,
) -> Played:
    """One step, whose segments take so long.

    `sees_copies`: whether a copy out is known to be over when it is. Else its source is free only when the window
    says that compute waits for it.
    """
    return _Step(moves, plan, link, sees_copies=sees_copies).play([0.0, *accumulate(seconds)])


class _Step(PlayedWindow[float]):
    """Keeps the time: a copy is the moment when it is over."""

    def __init__(self, moves: Sequence[Move], plan: OffloadPlan, link: Link, *, sees_copies: bool) -> None:
        super().__init__(plan)
        self._moves, self._link, self._sees_copies = moves, link, sees_copies
        self._by_key = {move.key: move for move in moves}
        self._now = 0.0
        self._at = 0  # the segment that begins now
        self._found = Played()
        self._out_free = self._back_free = 0.0

    def play(self, starts: Sequence[float]) -> Played:
        asked: Key | None = None  # last; who asks for more of it finds everything decided, as in a keeper
        for at, kind, move in _events(self._moves):
            if kind == "get" and move.key == asked:
                continue
            self._at, self._now = at, starts[at] + self._found.waited
            if kind == "put":
                self._wait(self.put(move.key))
            elif kind == "get":
                self._wait(self.get(move.key))
            else:
                self.drop(move.key)
            asked = move.key if kind == "get" else None
        if not self._sees_copies:  # at the end of the step all copies are over
            self._at = len(starts) - 1
            while self.leaving:
                self.left()
        return self._found

    def sizes(self, key: Key) -> tuple[int, int]:
        return self._by_key[key].device_bytes, self._by_key[key].kept_bytes

    def begin(self, way: Way, key: Key) -> float:
        found, size = self._found, self._by_key[key].bytes
        if way == "out":
            seconds = size / self._link.out
            found.out_seconds += seconds
            self._out_free = max(self._out_free, self._now) + seconds
            return self._out_free
        seconds = size / self._link.back
        found.back_seconds += seconds
        self._back_free = max(self._now, self.out[key], self._back_free) + seconds
        return self._back_free

    def is_over(self, copy: float) -> bool:
        return self._sees_copies and copy <= self._now

    def changed(self, what: Change, group: WindowGroup) -> None:
        self._found.changes.append((self._at, what, group.key))

    def _wait(self, copies: Iterable[float]) -> None:
        for then in copies:
            wait = max(0.0, then - self._now)
            if wait:
                self._found.waits.append((self._at, wait))
            self._found.waited += wait
            self._now += wait


def _events(moves: Sequence[Move]) -> list[tuple[int, Literal["put", "get", "drop"], Move]]:
    """The events of all groups in time; at the same time first puts, then drops, then gets."""
    found: list[tuple[int, int, Literal["put", "get", "drop"], Move]] = []
    for move in moves:
        found.append((move.put_at, 0, "put", move))
    for move in as_asked(moves):
        found += [(at, 2, "get", move) for at in move.asked_at if at < move.dropped_at]
        found.append((move.dropped_at, 1, "drop", move))
    found.sort(key=itemgetter(0, 1))
    return [(at, kind, move) for at, _, kind, move in found]
