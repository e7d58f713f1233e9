"""The first step of the `offload` home, which has no plan: exact copies to ordinary host memory, one by one.

It waits for the device at every group. It records the order of the step, the rows that were valid and how far
memory was from its peak. The plan of later steps is made from that.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from pagestash.pages.slabs import aligned
from pagestash.policy import Rule
from pagestash.saved.homes import Tally
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


@dataclass(slots=True, eq=False)
class _MeasuredGroup:
    """Each entry's shape and valid bytes, under which rule; and how many entries are not dropped yet."""

    key: Key
    rule: Rule
    microbatch: Hashable
    entries: list[tuple[EntryShape, int]]
    waiting: int = 0


@dataclass(slots=True, eq=False)
class HostCopy:
    """The place of an entry: its valid bytes, in ordinary host memory."""

    phase: "Measuring"
    group: _MeasuredGroup
    copy: torch.Tensor
    device: torch.device

    def get(self, entry: Entry) -> torch.Tensor:
        self.phase.asked(self.group)
        flat = torch.zeros(entry.length, dtype=torch.uint8, device=self.device)
        flat[: self.copy.numel()].copy_(self.copy.view(-1))
        return flat

    def drop(self, entry: Entry) -> None:
        self.phase.dropped(self.group, entry.region, self.copy.nbytes)
        entry.place = None


class Measuring:
    """Takes everything to the host and brings it back when asked."""

    def __init__(self, order: StepOrder, meter: HeadroomMeter, tally: Tally) -> None:
        self.meter = meter
        self._order = order
        self._tally = tally
        self._groups: dict[Key, _MeasuredGroup] = {}
        self._waiting = 0
        """Entries of all steps that are not dropped yet."""
        self._left: set[Key] = set()
        self._left_before: set[Key] = set()
        """Groups that waited when the last step was over, and the one before. If a module keeps a result with its
        graph, which is in no loss, it waits in each step."""

    @property
    def live(self) -> bool:
        """Whether a backward may still ask for something."""
        return self._waiting > 0

    @property
    def undecided(self) -> bool:
        """Whether a backward of the step is still to come."""
        waiting = self._waiting_groups()
        return bool(waiting) and not (self._order.asked and waiting <= self._left_before)

    def _waiting_groups(self) -> set[Key]:
        return {key for key, group in self._groups.items() if group.waiting}

    def start(self) -> None:
        """A new step begins; what was measured before is forgotten, unless its backward is still to come."""
        if self._order.asked or not self._waiting_groups():
            self._order.start()
            self.meter.start()
            self._groups = {}

    def commit(self) -> None:
        """A step is over."""
        self._left_before, self._left = self._left, self._waiting_groups()

    def put(self, entries: Sequence[Entry]) -> None:
        rule = entries[0].rule
        assert rule is not None
        key = self._order.key(entries[0].region)
        group = self._groups[key] = _MeasuredGroup(key, rule, self._order.microbatch, [])
        self._order.put(key, GroupBytes(0, 0, rule.prefetch_bytes))
        for entry in entries:
            source = entry.source().view(-1)[: entry.valid_bytes()]
            group.entries.append((EntryShape.of(entry), source.nbytes))
            # A copy also where the device is the host: the source may be written over.
            entry.place = HostCopy(self, group, source.detach().to("cpu", copy=True), source.device)
            entry.origin = None
            group.waiting += 1
            self._waiting += 1
            self._tally.count(entry.region, source.nbytes)
        self.meter.note(("put", key))

    def asked(self, group: _MeasuredGroup) -> None:
        """Backward asks for an entry of the group."""
        if self._groups.get(group.key) is group:
            self._order.get(group.key)
            self.meter.note(("get", group.key))

    def dropped(self, group: _MeasuredGroup, region: str, size: int) -> None:
        """Nothing can ask for an entry of the group any more."""
        self._tally.count(region, -size)
        self._waiting -= 1
        group.waiting -= 1
        if not group.waiting and self._groups.get(group.key) is group:
            self._order.drop(group.key)

    def outlook(self, page_bytes: int) -> Outlook | None:
        """What follows from the last step; None if it moved nothing, or is not over."""
        if not self._groups or self.undecided:
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
