"""The `offload` home of the first steps, which have no plan: exact copies to ordinary host memory, one by one.

It waits for the device at every group. What it writes down, the order of the step, the rows that were valid and how
far memory was from its peak, is what the plan of the steps to come is made from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagestash.pages.slabs import aligned
from pagestash.policy import HomeName, Rule
from pagestash.saved.homes import Home
from pagestash.saved.order import Group, Key, Plan, Recorder, make_plan
from pagestash.saved.pressure import Pressure
from pagestash.saved.split import Shape, Split
from pagestash.saved.storage import Entry


@dataclass(slots=True, eq=False)
class Measured:
    """What was seen of one group: each entry's shape and valid bytes, under which rule."""

    rule: Rule
    entries: list[tuple[Shape, int]]
    left: int = 0


@dataclass(slots=True)
class Outlook:
    """What a measured step says about those to come."""

    plan: Plan
    split: Split
    host_bytes: int
    pages: int
    """Pages for rows that do not leave."""


@dataclass(slots=True)
class _Waiting:
    """The place of an entry: its valid bytes, in ordinary host memory."""

    home: "MeasuredOffload"
    copy: torch.Tensor
    key: Key
    device: torch.device

    def get(self, entry: Entry) -> torch.Tensor:
        self.home.asked(self.key)
        flat = torch.zeros(entry.length, dtype=torch.uint8, device=self.device)
        flat[: self.copy.numel()].copy_(self.copy.view(-1))
        return flat

    def drop(self, entry: Entry) -> None:
        self.home.dropped(self.key, entry.region, self.copy.nbytes)
        entry.place = None


class MeasuredOffload(Home):
    """Takes everything to the host and brings it back when asked."""

    name: HomeName = "offload"

    def __init__(self, recorder: Recorder, pressure: Pressure) -> None:
        super().__init__()
        self._recorder = recorder
        self._pressure = pressure
        self._seen: dict[Key, Measured] = {}

    @property
    def live(self) -> bool:
        """Whether a backward is still to come."""
        return any(seen.left for seen in self._seen.values())

    def start(self) -> None:
        """A new step begins; what was seen before is forgotten, unless its backward is still to come."""
        if not self.live:
            self._recorder.start()
            self._pressure.start()
            self._seen = {}

    def put(self, group: Sequence[Entry]) -> None:
        rule = group[0].rule
        assert rule is not None
        key = self._recorder.key(group[0].region)
        seen = self._seen[key] = Measured(rule, [])
        self._recorder.put(key, Group(0, 0, rule.prefetch_bytes))
        for entry in group:
            source = entry.source().view(-1)[: entry.valid_bytes()]
            seen.entries.append((Shape.of(entry), source.nbytes))
            # A copy also where the device is the host: the source may be written over.
            entry.place = _Waiting(self, source.detach().to("cpu", copy=True), key, source.device)
            entry.origin = None
            seen.left += 1
            self.tally.count(entry.region, source.nbytes)
        self._pressure.note(("put", key))

    def asked(self, key: Key) -> None:
        self._recorder.get(key)
        self._pressure.note(("get", key))

    def dropped(self, key: Key, region: str, size: int) -> None:
        self.tally.count(region, -size)
        seen = self._seen[key]
        seen.left -= 1
        if not seen.left:
            self._recorder.drop(key)

    def outlook(self, page_bytes: int) -> Outlook | None:
        """The plan that follows from the last step; None if it moved nothing, or is not over."""
        if not self._seen or self.live:
            return None
        split = Split(self._expected_rows())
        events = self._recorder.events
        groups = {}
        shares: dict[Key, list[int]] = {}
        for key, seen in self._seen.items():
            shares[key] = [split.share(seen.rule, shape) for shape, _ in seen.entries]
            room = sum(shape.length for (shape, _), share in zip(seen.entries, shares[key]) if share)
            groups[key] = Group(sum(map(aligned, shares[key])), room, seen.rule.prefetch_bytes)
        plan = make_plan(events, groups, self._recorder.turns)
        plan.slack = self._pressure.slack()
        now = most = 0
        for kind, key in events:
            pages = 0
            seen = self._seen[key]
            for (shape, valid), share in zip(seen.entries, shares[key]):
                leaves = 0 if key in plan.stays else share
                in_part = 0 < leaves < shape.length
                if shape.capacity and (in_part or not (leaves or split.mostly_valid(seen.rule, shape))):
                    pages += max(1, -(-(valid - leaves) // page_bytes))
            now += pages * {"put": 1, "get": 0, "drop": -1}[kind]
            most = max(most, now)
        return Outlook(plan, split, plan.peak_bytes(events), most)

    def _expected_rows(self) -> dict[tuple[str, int], float]:
        """The mean over a rule's tensors of one capacity: they vary from step to step as from layer to layer."""
        found: dict[tuple[str, int], list[int]] = {}
        for seen in self._seen.values():
            for shape, valid in seen.entries:
                if shape.capacity:
                    found.setdefault((seen.rule.match, shape.capacity), []).append(valid // shape.row_bytes)
        return {which: sum(rows) / len(rows) for which, rows in found.items()}
