"""What the first step of offload shows, in which all groups leave and each return is waited for.

How much host memory a step takes and how many rows are valid is not known before: that step takes ordinary memory,
and asks the device for the rows. The plan of later steps is made from what it finds.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagestash.pages.slabs import aligned
from pagestash.policy import Rule
from pagestash.saved.offload.headroom import HeadroomMeter
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, StepOrder, make_plan
from pagestash.saved.offload.split import EntryShape, RowSplit, mean_rows
from pagestash.saved.storage import Entry


@dataclass(slots=True)
class Outlook:
    """What a measured step says about those to come."""

    plan: OffloadPlan
    split: RowSplit
    host_bytes: int
    pages: int
    """Pages for rows that do not leave."""


class _MeasuredGroup(NamedTuple):
    rule: Rule
    microbatch: Hashable
    entries: list[tuple[EntryShape, int]]
    """Each entry's shape and valid bytes."""


class FirstStep:
    """The groups of the step that is measured, and how far memory was from its peak."""

    def __init__(self, order: StepOrder, meter: HeadroomMeter) -> None:
        self.meter = meter
        self._order = order
        self._groups: dict[Key, _MeasuredGroup] = {}
        self._left: set[Key] = set()
        self._left_before: set[Key] = set()
        """Groups that waited when the last step was over, and the one before. If a module keeps a result with its
        graph, which is in no loss, it waits in each step."""

    def start(self, waiting: set[Key]) -> None:
        """A step begins; what was measured before is forgotten, unless its backward is still to come."""
        if self._order.asked or not waiting:
            self._order.start()
            self.meter.start()
            self._groups = {}

    def commit(self, waiting: set[Key]) -> None:
        """A step is over; groups that are still `waiting`."""
        self._left_before, self._left = self._left, waiting

    def undecided(self, waiting: set[Key]) -> bool:
        """Whether a backward of the step is still to come."""
        return bool(waiting) and not (self._order.asked and waiting <= self._left_before)

    def valid_bytes(self, key: Key, rule: Rule, entries: Sequence[Entry]) -> list[int]:
        """The bytes of each entry of a group that leave: all that are valid. Waits for the device."""
        sizes = [entry.valid_bytes() for entry in entries]
        shapes = [EntryShape.of(entry) for entry in entries]
        self._groups[key] = _MeasuredGroup(rule, self._order.microbatch, list(zip(shapes, sizes)))
        return sizes

    def outlook(self, waiting: set[Key], page_bytes: int) -> Outlook | None:
        """What follows from the last step; None if it moved nothing, or is not over."""
        if not self._groups or self.undecided(waiting):
            return None
        split = RowSplit(self._expected_rows())
        events = self._order.events
        groups = {}
        shares: dict[Key, list[int]] = {}
        for key, group in self._groups.items():
            split.go_on_with(group.microbatch)
            shares[key] = [split.share(group.rule, shape) for shape, _ in group.entries]
            back = sum(shape.length for (shape, _), share in zip(group.entries, shares[key]) if share)
            groups[key] = GroupBytes(sum(map(aligned, shares[key])), back, group.rule.prefetch_bytes)
        plan = make_plan(events, groups, self._order.immediate_backwards)
        plan.headroom = self.meter.headroom()
        pages = {key: self._pages(key, plan, split, shares[key], page_bytes) for key in groups}
        return Outlook(plan, split, plan.host_peak_bytes(events), _peak(events, pages))

    def _pages(self, key: Key, plan: OffloadPlan, split: RowSplit, shares: list[int], page_bytes: int) -> int:
        """Pages that a group's rows need: those behind the rows that leave, or all where none leaves."""
        group, pages = self._groups[key], 0
        for (shape, valid), share in zip(group.entries, shares):
            leaves = 0 if key in plan.stays else share
            in_part = 0 < leaves < shape.length
            if shape.capacity and (in_part or not (leaves or split.mostly_valid(group.rule, shape))):
                pages += max(1, -(-(valid - leaves) // page_bytes))
        return pages

    def _expected_rows(self) -> dict[tuple[str, int], float]:
        """The mean over a rule's tensors of one capacity."""
        found: dict[tuple[str, int], list[int]] = {}
        for group in self._groups.values():
            for shape, valid in group.entries:
                if shape.capacity:
                    found.setdefault((group.rule.match, shape.capacity), []).append(valid // shape.row_bytes)
        return mean_rows(found)


def _peak(events: Sequence[Event], sizes: dict[Key, int]) -> int:
    """The largest sum of the sizes of groups that were put and not dropped."""
    now = most = 0
    for kind, key in events:
        now += sizes[key] * {"put": 1, "get": 0, "drop": -1}[kind]
        most = max(most, now)
    return most
