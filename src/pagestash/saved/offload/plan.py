"""The order in which a step puts groups away and asks for them again, and the plan that follows from it.

One step is recorded. The plan says which groups never leave, because backward asks for them soon, and how many
bytes the others may take while they leave and come back. `window.py` decides by it.
"""

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Key = tuple[Hashable, ...]
"""A group: its position in the step (stage and microbatch, where a schedule is followed), its region, and its index
among that region's groups there."""
WINDOW = 3
"""Times the largest group: one in use, the largest on its way, and smaller ones between them."""
Event = tuple[Literal["put", "get", "drop"], Key]


@dataclass(slots=True)
class GroupBytes:
    """What the plan has to know of a group."""

    host_bytes: int
    """Host memory that it takes."""
    device_bytes: int
    """Device memory that it takes once it is back. A valid-row tensor comes back at its full capacity. What a
    rule's fraction leaves on the device is no part of it."""
    window: int | None = None
    """Its rule's `prefetch_bytes`; None: the plan's window."""


class StepOrder:
    """Records the puts, first gets and drops of one step."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.groups: dict[Key, GroupBytes] = {}
        self.position: Key = ()
        """Where in the step we are. A schedule that is followed sets (stage, microbatch)."""
        self.immediate_backwards: frozenset[Key] = frozenset()
        """Positions whose backward follows their forward at once."""
        self.microbatch: Hashable = None
        """Of the last group that was put. Without a schedule, the first put after a backward begins another one."""
        self._turns = 0
        """How often a put followed a backward."""
        self._in_backward = False
        self._counts: dict[Key, int] = {}
        self._asked: set[Key] = set()

    @property
    def asked(self) -> bool:
        """Whether the step has asked for anything so far."""
        return bool(self._asked)

    def key(self, region: str) -> Key:
        """The key of a group that is put now."""
        where = (*self.position, region)
        index = self._counts.get(where, 0)
        self._counts[where] = index + 1
        key = (*where, index)
        if self.position:
            _, self.microbatch = self.position
        else:
            self._turns += self._in_backward
            self.microbatch = ("turn", self._turns)  # which is none of a schedule's
        self._in_backward = False
        return key

    def put(self, key: Key, group: GroupBytes) -> None:
        self.groups[key] = group
        self.events.append(("put", key))

    def get(self, key: Key) -> None:
        """Only the first get of a group counts. The get of a group of an earlier step does not."""
        if key in self.groups and key not in self._asked:
            self._asked.add(key)
            self.events.append(("get", key))
            self._in_backward = True

    def drop(self, key: Key) -> None:
        if key in self.groups:
            self.events.append(("drop", key))

    def start(self) -> None:
        """A new step."""
        self.events, self.groups, self._counts, self._asked = [], {}, {}, set()
        self.microbatch, self._turns, self._in_backward = None, 0, False


@dataclass(slots=True)
class OffloadPlan:
    """Which groups stay on the device, and what a step does after each of its events."""

    groups: dict[Key, GroupBytes]
    order: Sequence[Event] = ()
    """Puts and gets of the step."""
    window: int = 0
    """Device bytes for groups that stay, leave or come back, where their rule says nothing else."""
    stays: frozenset[Key] = frozenset()
    resident_peak_bytes: int = 0
    """The most device bytes that groups which stay take at one time; the window, where forward turns into the
    backward of another group than the one just put."""
    headroom: dict[Event, int] = field(default_factory=dict)
    """After an event, how many bytes memory was from its peak in the measured step; 0 where that is not known."""
    _index: dict[Event, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = {event: index for index, event in enumerate(self.order)}

    def behind(self, event: Event) -> int:
        """Where in `order` the events after `event` begin; at its end for an event that it does not know."""
        return self._index.get(event, len(self.order)) + 1

    def window_of(self, key: Key) -> int:
        """The window of a group: its rule's, or the plan's."""
        group = self.groups.get(key)
        return self.window if group is None or group.window is None else group.window

    def next_put_bytes(self, index: int) -> int:
        """Device bytes of the group that is put after the event of this index; 0 if a get comes next."""
        kind, key = self.order[index + 1] if index + 1 < len(self.order) else ("get", ())
        return self.groups[key].device_bytes if kind == "put" else 0

    def tighten(self, size: int) -> None:
        """So many bytes are taken from now on that were free when the step was measured."""
        self.headroom = {event: max(0, free - size) for event, free in self.headroom.items()}

    def agrees_with(self, order: StepOrder) -> bool:
        """Whether a step put and asked for the same groups in the same order as this plan's."""
        return self.order == _puts_and_gets(order.events)

    def host_peak_bytes(self, events: Sequence[Event]) -> int:
        """The most host memory that is in use at one time, in a step of these events."""
        now = most = 0
        for kind, key in events:
            if key in self.stays:
                continue
            if kind == "put":
                now += self.groups[key].host_bytes
                most = max(most, now)
            elif kind == "drop":
                now -= self.groups[key].host_bytes
        return most


def make_plan(
    events: Sequence[Event], groups: dict[Key, GroupBytes], immediate_backwards: Container[Key] = ()
) -> OffloadPlan:
    """The plan for a step of these events. Groups at a position in `immediate_backwards` stay."""
    window = WINDOW * max((group.device_bytes for group in groups.values()), default=0)
    plan = OffloadPlan(groups, _puts_and_gets(events), window)
    plan.stays = frozenset(_staying(plan, {key for key in groups if key[:-2] in immediate_backwards}))
    plan.resident_peak_bytes = _resident_peak(plan)
    return plan


def _staying(plan: OffloadPlan, at_once: set[Key]) -> set[Key]:
    """The groups that never leave.

    Those in `at_once` stay, and take no part in the following. Of the others, C are the candidates: put, and not
    asked for yet. After every event, the candidate k that is asked for last leaves C until (d: device bytes)

        sum of d over C  +  d(the group put now, if it is no candidate)  +  d(the group put or fetched next)
            <=  window of k,

    or until k is asked for by the very next event. A candidate that is still one when it is asked for stays.
    """
    asked_at = {key: index for index, (kind, key) in enumerate(plan.order) if kind == "get"}
    stays = at_once | {key for key, group in plan.groups.items() if not group.host_bytes}
    candidates: dict[Key, int] = {}
    waiting = 0  # bytes of all candidates
    for index, (kind, key) in enumerate(plan.order):
        coming = plan.next_put_bytes(index)
        if kind == "put":
            if key not in asked_at or key in stays:
                continue
            waiting += 0 if key in candidates else plan.groups[key].device_bytes
            candidates[key] = asked_at[key]
        elif candidates.pop(key, None) is not None:
            waiting -= plan.groups[key].device_bytes
            stays.add(key)
            continue
        elif key not in stays:
            coming = plan.groups[key].device_bytes
        while candidates:
            last = max(candidates, key=candidates.__getitem__)
            leaving = plan.groups[key].device_bytes if kind == "put" and key not in candidates else 0
            if coming + leaving + waiting <= plan.window_of(last) or candidates[last] == index + 1:
                break
            del candidates[last]
            waiting -= plan.groups[last].device_bytes
    return stays


def _resident_peak(plan: OffloadPlan) -> int:
    """The plan's `resident_peak_bytes`.

    Where a group leaves and the next event is a get, as in a pipeline, what leaves and what comes back share the
    window, and so the window it is.
    """
    now = most = 0
    for index, (kind, key) in enumerate(plan.order):
        group = plan.groups[key]
        if key not in plan.stays:
            if kind == "put" and index + 1 < len(plan.order) and plan.order[index + 1][0] == "get":
                return plan.window
        elif group.host_bytes:
            now += group.device_bytes if kind == "put" else -group.device_bytes
            most = max(most, now)
    return most


def _puts_and_gets(events: Sequence[Event]) -> list[Event]:
    """Without drops, which follow from them, in whichever thread a graph dies."""
    return [event for event in events if event[0] != "drop"]
