"""The order in which a step puts groups away and asks for them again, and what follows from it.

Recorded once, it tells for every group how much passes between its put and its get. What comes back at once is
not worth moving; the rest is fetched a certain number of bytes ahead of the compute that needs it.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

Key = tuple[Hashable, ...]
"""A group: where in the step (microbatch, stage), which region, and the how-manieth of that region there."""
Event = tuple[Literal["put", "get", "drop"], Key]


@dataclass(slots=True)
class Group:
    """What the order has to know of a group.

    It takes `size` bytes of host memory, `room` bytes of the device when it is back (a valid-row tensor comes
    back at its full capacity), and it is fetched `ahead` bytes ahead, or as the plan says.
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
        """Only the first counts: whoever asks again finds it there, or waits."""
        if key not in self._asked:
            self._asked.add(key)
            self.events.append(("get", key))

    def drop(self, key: Key) -> None:
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
    _index: dict[Event, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = {event: index for index, event in enumerate(self.order)}

    def after(self, event: Event) -> Iterator[Event]:
        """What comes after `event`, next first; nothing for an event that it does not know."""
        at = self._index.get(event)
        return iter(()) if at is None else islice(self.order, at + 1, None)

    def ahead(self, key: Key) -> int:
        """Bytes that may be on the device or on their way when this group is fetched, itself included."""
        group = self.groups[key]
        return self.window if group.ahead is None else group.ahead

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


def make_plan(events: Sequence[Event], groups: dict[Key, Group]) -> Plan:
    """The plan for a step of these events.

    The window is twice the largest group where a rule gives none: one group in use, and the largest on its
    way. A group stays if all that is touched between its put and its get, and the group itself, fit in the
    window, which is just the memory that prefetching takes later in backward. The last group of a forward,
    with nothing in between, always stays.
    """
    window = 2 * max((group.room for group in groups.values()), default=0)
    plan = Plan(groups, _order_of(events), window)
    plan.stays = frozenset(
        key
        for kind, key in plan.order
        if kind == "put" and (not groups[key].size or _returns_soon(plan, key))
    )
    return plan


def _returns_soon(plan: Plan, key: Key) -> bool:
    """Whether a group is asked for before a window of bytes was touched since its put."""
    between: set[Key] = set()
    distance = plan.groups[key].room
    for kind, other in plan.after(("put", key)):
        if other == key:
            return kind == "get"
        if other not in between:
            between.add(other)
            distance += plan.groups[other].room
            if distance > plan.ahead(key):
                return False
    return False  # never asked for


def _order_of(events: Sequence[Event]) -> list[Event]:
    """Puts and gets; drops follow from them, in whichever thread a graph dies."""
    return [event for event in events if event[0] != "drop"]
