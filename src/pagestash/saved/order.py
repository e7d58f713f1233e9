"""The order in which a step puts groups away and asks for them again, and what follows from it.

Recorded once, it tells for every group how much passes between its put and its get. What comes back at once is
not worth moving; the rest is fetched a certain number of bytes ahead of the compute that needs it.
"""

from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

Key = tuple[Hashable, ...]
"""A group: where in the step (microbatch, stage), which region, and the how-manieth of that region there."""
WINDOW = 3
"""Times the largest group."""
Event = tuple[Literal["put", "get", "drop"], Key]


@dataclass(slots=True)
class Group:
    """What the order has to know of a group.

    It takes `size` bytes of host memory, `room` bytes of the device when it is back (a valid-row tensor comes
    back at its full capacity; what a rule's fraction leaves there is no part of it), and it is fetched `ahead`
    bytes ahead, or as the plan says.
    """

    size: int
    room: int
    ahead: int | None = None


class Recorder:
    """Writes down the puts, first gets and drops of one step."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.groups: dict[Key, Group] = {}
        self.place: Key = ()
        """Where in the step we are: what a pipeline schedule sets to tell microbatches and stages apart."""
        self.turns: frozenset[Key] = frozenset()
        """Places whose backward comes at once when their forward is over."""
        self._counts: dict[Key, int] = {}
        self._asked: set[Key] = set()

    def key(self, region: str) -> Key:
        """The key of a group that is put now."""
        where = (*self.place, region)
        number = self._counts.get(where, 0)
        self._counts[where] = number + 1
        return (*where, number)

    def put(self, key: Key, group: Group) -> None:
        self.groups[key] = group
        self.events.append(("put", key))

    def get(self, key: Key) -> None:
        """Only the first counts: whoever asks again finds it there, or waits. One of an earlier step does not."""
        if key in self.groups and key not in self._asked:
            self._asked.add(key)
            self.events.append(("get", key))

    def drop(self, key: Key) -> None:
        if key in self.groups:
            self.events.append(("drop", key))

    def start(self) -> None:
        """A new step."""
        self.events, self.groups, self._counts, self._asked = [], {}, {}, set()


@dataclass(slots=True)
class Plan:
    """Which groups stay on the device, and what a step does after each of its events."""

    groups: dict[Key, Group]
    order: Sequence[Event] = ()
    window: int = 0
    stays: frozenset[Key] = frozenset()
    standing: int = 0
    """Bytes that offloaded groups take on the device when most is saved."""
    slack: dict[Event, int] = field(default_factory=dict)
    """After an event, bytes that memory was from its peak when the step was measured; 0 where that is not known."""
    _index: dict[Event, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = {event: index for index, event in enumerate(self.order)}

    def after(self, event: Event) -> Iterator[Event]:
        """What comes after `event`, next first; nothing for an event that it does not know."""
        at = self._index.get(event)
        return iter(()) if at is None else islice(self.order, at + 1, None)

    def ahead(self, key: Key) -> int:
        """The window of a group: its rule's, or the common one."""
        group = self.groups.get(key)
        return self.window if group is None or group.ahead is None else group.ahead

    def making_after(self, index: int) -> int:
        """Bytes of the group that forward makes after the event of this index; 0 if backward comes next."""
        kind, key = self.order[index + 1] if index + 1 < len(self.order) else ("get", ())
        return self.groups[key].room if kind == "put" else 0

    def leaving_limit(self, key: Key, there: int) -> int:
        """Bytes that may still be on their way out when `key` was put and `there` bytes are on the device.

        They share the window with those, and with what forward makes meanwhile, or all of them together would be
        where memory peaks: at the turn of a step, and of each microbatch.
        """
        room = self.ahead(key)
        kind, following = next(self.after(("put", key)), ("get", key))
        if kind == "put":
            room = max(room, self.window) - self.groups[following].room
        return max(0, room - there)

    def fetch_limit(self, key: Key) -> int:
        """Bytes that may be on the device or on their way when this group is fetched, itself included.

        No more than stood there at the turn, or fetching would raise the peak that offload lowers.
        """
        return min(self.ahead(key), max(self.standing, self.groups[key].room))

    def tighten(self, size: int) -> None:
        """So many bytes are taken from now on that were free when the step was measured."""
        self.slack = {event: max(0, slack - size) for event, slack in self.slack.items()}

    def agrees_with(self, recorder: Recorder) -> bool:
        """Whether a step put and asked for the same groups in the same order as this plan's."""
        return self.order == _order_of(recorder.events)

    def peak_bytes(self, events: Sequence[Event]) -> int:
        """The most bytes that have left at one time, in a step of these events."""
        now = most = 0
        for kind, key in events:
            if key in self.stays:
                continue
            if kind == "put":
                now += self.groups[key].size
                most = max(most, now)
            elif kind == "drop":
                now -= self.groups[key].size
        return most


def make_plan(events: Sequence[Event], groups: dict[Key, Group], turns: Container[Key] = ()) -> Plan:
    """The plan for a step of these events, in which the groups of the places in `turns` stay.

    The window is three times the largest group where a rule gives none: one in use, the largest on its way, and
    smaller ones between them. What fits in it stays, of everything that was put so far those groups that are asked
    for soonest. The last group of a forward, whose backward comes at once, always stays.
    """
    window = WINDOW * max((group.room for group in groups.values()), default=0)
    plan = Plan(groups, _order_of(events), window)
    plan.stays = frozenset(_staying(plan, {key for key in groups if key[:-2] in turns}))
    plan.standing = _standing(plan)
    return plan


def _staying(plan: Plan, turned: set[Key]) -> set[Key]:
    """The groups that never leave: at every put, those asked for last make room, and so at every fetch.

    Room is also for the group that forward makes next, and for the one just put, if it leaves, on its way out.
    Those of `turned` stay without taking part: their backward is the next thing.
    """
    asked_at = {key: index for index, (kind, key) in enumerate(plan.order) if kind == "get"}
    stays = turned | {key for key, group in plan.groups.items() if not group.size}
    there: dict[Key, int] = {}
    for index, (kind, key) in enumerate(plan.order):
        coming = plan.making_after(index)
        if kind == "put":
            if key not in asked_at or key in stays:
                continue
            there[key] = asked_at[key]
        elif there.pop(key, None) is not None:
            stays.add(key)
            continue
        elif key not in stays:
            coming = plan.groups[key].room
        while there:
            last = max(there, key=lambda other: there[other])
            leaving = plan.groups[key].room if kind == "put" and key not in there else 0
            taken = coming + leaving + sum(plan.groups[other].room for other in there)
            if taken <= plan.ahead(last) or there[last] == index + 1:
                break
            del there[last]
    return stays


def _standing(plan: Plan) -> int:
    """The most bytes that stay at one time; a window where forward turns into the backward of something else.

    There, in a pipeline, what leaves and what comes back share the window anyway.
    """
    now = most = 0
    for index, (kind, key) in enumerate(plan.order):
        group = plan.groups[key]
        if key not in plan.stays:
            if kind == "put" and index + 1 < len(plan.order) and plan.order[index + 1][0] == "get":
                return plan.window
        elif group.size:
            now += group.room if kind == "put" else -group.room
            most = max(most, now)
    return most


def _order_of(events: Sequence[Event]) -> list[Event]:
    """Puts and gets; drops follow from them, in whichever thread a graph dies."""
    return [event for event in events if event[0] != "drop"]
