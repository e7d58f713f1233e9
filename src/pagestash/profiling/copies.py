"""The copies of a policy's offload, on the timeline of a measured step.

The step is simulated by the keeper's own rules: its plan (`saved/offload/plan.py`) decides which groups stay,
its window (`saved/offload/window.py`) what leaves and what is fetched at which event. Only time is modelled
here: compute takes its measured time, the link moves one copy at a time in each direction, and compute waits
when the window says so. `Profile.fits` asks how long compute waits; a plan also where the bytes are meanwhile.

Which tensors leave under a `fraction` is decided by the keeper's own rule, too (`saved/offload/split.py`).

A keeper may differ from this in two points, which a profile does not know:

- The headroom: where memory is far below its peak, a keeper lets copies out take longer, so it waits no longer.
- Which part of a storage a tensor covers. Here the whole storage counts, once, and a thin slice of it (less than
  half) where another group has it. A keeper moves the range that a region's tensors cover, and a thin slice of what
  it spans by itself, if its group does not take that anyway.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple

from pagestash.policy import HomeName, Rule
from pagestash.profiling.assign import Rules, rule_of
from pagestash.profiling.link import Link
from pagestash.profiling.records import SavedTensor, Segment
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, make_plan
from pagestash.saved.offload.split import EntryShape, RowSplit, mean_rows
from pagestash.saved.offload.window import Decision, Window, WindowGroup
from pagestash.saved.storage import SPARSE


@dataclass(frozen=True, slots=True)
class Move:
    """One group: when its region ends, when backward first needs it, and when backward is done with it."""

    key: Key
    ready: float
    needed: float
    bytes: int
    """Bytes copied each way."""
    device_bytes: int
    """Of the storages that leave."""
    kept_bytes: int
    """Of those that do not, by its rule's `fraction`."""
    window: int | None
    """Its rule's `prefetch_bytes`."""
    storages: tuple[int, ...]
    leaving: frozenset[int]
    """The storages that leave, in whole or in part: all, unless its rule has a `fraction`."""
    put_at: int
    """The segment that begins when its region ends."""
    asked_at: tuple[int, ...]
    """The segments of backward that begin by asking for one of its tensors, in order."""
    dropped_at: int
    """The segment that begins when backward is done with it."""
    own: bool = True
    """Whether no fused operation claims its tensors."""
    slices: tuple[tuple[int, int], ...] = ()
    """Thin slices of storages that another group takes whole, whose elements are copied: saved when, and bytes."""

    @property
    def slice_bytes(self) -> int:
        return sum(size for _, size in self.slices)


def moves_of(
    policy: Rules,
    tensors: Sequence[SavedTensor],
    homes: Sequence[HomeName],
    segments: Sequence[Segment],
    positions: Mapping[str, Key] = MappingProxyType({}),
) -> list[Move]:
    """The groups that leave, each storage once. When a region ends, what a fused operation claims in it leaves
    together, and then what else it saved; each returns together.

    Under a schedule, `positions` has the stage and the microbatch of each region.
    """
    if "offload" not in homes:
        return []
    ends = list(accumulate(segment.seconds for segment in segments))
    groups: dict[_Group, list[SavedTensor]] = {}
    slices: dict[_Group, list[SavedTensor]] = {}
    owners: dict[int, _Group] = {}
    for tensor, home in zip(tensors, homes):
        # (A tensor that is neither the first of its storage nor thin has no bytes of its own.)
        if home != "offload" or (tensor.storage in owners and not _is_thin(tensor)):
            continue
        _, name = rule_of(policy, tensor.path)
        where = _Group(_last_segment(segments, tensor.saved_at, name), not tensor.claimed, name)
        if tensor.storage not in owners:
            owners[tensor.storage] = where
            groups.setdefault(where, []).append(tensor)
        elif owners[tensor.storage] != where:
            groups.setdefault(where, [])
            slices.setdefault(where, []).append(tensor)
    rules = {where.name: rule for where in groups if (rule := policy.rule_for(where.name)) is not None}
    split = RowSplit(_expected_rows((rules[where.name], group) for where, group in groups.items()))
    moves = []
    for where, group in sorted(groups.items(), key=lambda item: item[0][:2]):
        last, own, name = where
        rule, thin = rules[name], slices.get(where, [])
        sliced = sum(tensor.bytes for tensor in thin)
        shares = {tensor.storage: split.share(rule, _shape(tensor)) for tensor in group}
        asked = tuple(sorted(tensor.needed_at for tensor in (*group, *thin)))
        moves.append(
            Move(
                key=(*positions.get(name, ()), name, 2 * last + own),
                ready=ends[last],
                needed=ends[asked[0] - 1],
                bytes=sum(shares.values()) + sliced,
                device_bytes=sum(tensor.storage_bytes for tensor in group if shares[tensor.storage]) + sliced,
                kept_bytes=sum(tensor.storage_bytes for tensor in group if not shares[tensor.storage]),
                window=rule.prefetch_bytes,
                storages=tuple(shares),
                leaving=frozenset(storage for storage, share in shares.items() if share),
                put_at=last + 1,
                asked_at=asked,
                dropped_at=1 + max(tensor.freed_at for tensor in (*group, *thin)),
                own=own,
                slices=tuple((tensor.saved_at, tensor.bytes) for tensor in thin),
            )
        )
    return moves


class _Group(NamedTuple):
    """Tensors that move together: when a region ends, those that a fused operation claims, and then the others."""

    last: int
    """The last segment of the region."""
    own: bool
    """Whether no operation claims them."""
    name: str


def _is_thin(tensor: SavedTensor) -> bool:
    """Whether a keeper copies its elements, unless its group takes the storage anyway; see `saved/hooks.py`."""
    return SPARSE * tensor.bytes < tensor.storage_bytes


def _shape(tensor: SavedTensor) -> EntryShape:
    """What the keeper's split sees; with rows where the measured step did not fill all of them."""
    rows = tensor.shape[0] if tensor.shape else 0
    has_rows = tensor.valid_bytes < tensor.storage_bytes and rows and not tensor.storage_bytes % rows
    return EntryShape(tensor.storage_bytes, rows if has_rows else 0)


def _expected_rows(
    groups: Iterable[tuple[Rule, Sequence[SavedTensor]]],
) -> dict[tuple[str, int], float]:
    """Valid rows that the keeper expects, by a rule's pattern and the capacity of its tensors."""
    found: dict[tuple[str, int], list[int]] = {}
    for rule, tensors in groups:
        for tensor in tensors:
            if (shape := _shape(tensor)).capacity:
                rows = tensor.valid_bytes // shape.row_bytes
                found.setdefault((rule.match, shape.capacity), []).append(rows)
    return mean_rows(found)


def _last_segment(segments: Sequence[Segment], start: int, name: str) -> int:
    """The last segment of the region that was running in segment `start`."""
    if name not in segments[start].path:
        name = segments[start].region  # claimed by a fused operation: both regions end together
    last = start
    while (
        last + 1 < len(segments) and segments[last + 1].way == "forward" and name in segments[last + 1].path
    ):
        last += 1
    return last


def plan_of(moves: Sequence[Move], at_once: Container[Key] = ()) -> OffloadPlan:
    """The keeper's plan. Groups at a position in `at_once`, whose backward follows its forward, stay."""
    groups = {move.key: GroupBytes(move.bytes, move.device_bytes, move.window) for move in moves}
    found: list[tuple[int, int, Event]] = [(move.put_at, 0, ("put", move.key)) for move in moves]
    found += [(move.asked_at[0], 1, ("get", move.key)) for move in as_asked(moves)]
    found.sort(key=lambda item: item[:2])
    return make_plan([event for _, _, event in found], groups, at_once)


def as_asked(moves: Sequence[Move]) -> list[Move]:
    """In the order in which they are asked for at one time: what a region saved itself before what was claimed."""
    first = {(*move.key[:-1], move.put_at): index for index, move in reversed(list(enumerate(moves)))}
    return sorted(moves, key=lambda move: (first[*move.key[:-1], move.put_at], not move.own))


Change = Literal["put", "left", "fetched", "dropped"]


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


def play(moves: Sequence[Move], plan: OffloadPlan, seconds: Sequence[float], link: Link) -> Played:
    """One step, whose segments take so long."""
    starts = [0.0, *accumulate(seconds)]
    return _Step(plan, link).play(moves, starts)


class _Step:
    """The window decides, this class keeps the time."""

    def __init__(self, plan: OffloadPlan, link: Link) -> None:
        self._window = Window(plan)
        self._link = link
        self._now = 0.0
        self._at = 0  # the segment that begins now
        self._found = Played()
        self._out_free = self._back_free = 0.0
        self._copies: dict[Key, int] = {}  # bytes
        self._gone: dict[Key, float] = {}  # when the copy out ends
        self._here: dict[Key, float] = {}  # when the copy back ends
        self._leaving: list[WindowGroup] = []

    def play(self, moves: Sequence[Move], starts: Sequence[float]) -> Played:
        self._copies = {move.key: move.bytes for move in moves}
        held: dict[Key, WindowGroup] = {}
        for at, kind, move in _events(moves):
            self._at, self._now = at, starts[at] + self._found.waited
            if kind == "put":
                group = held[move.key] = self._put(move)
                self._see_what_has_left()
                self._carry_out(self._window.after_put(group))
            elif kind == "get":
                group = held[move.key]
                self._see_what_has_left()
                self._carry_out(self._window.get(group, kept=not group.away_bytes))
            else:
                self._drop(held[move.key])
        return self._found

    def _put(self, move: Move) -> WindowGroup:
        size, kept, key = move.device_bytes, move.kept_bytes, move.key
        self._found.changes.append((self._at, "put", key))
        if self._window.stays(key):
            group = WindowGroup(key, size, kept_bytes=size + kept)
        else:
            group = WindowGroup(
                key, size, away_bytes=size, travelling_bytes=size, kept_bytes=kept, leaving_bytes=size
            )
            seconds = self._copies[key] / self._link.out
            self._out_free = max(self._out_free, self._now) + seconds
            self._gone[key] = self._out_free
            self._leaving.append(group)
            self._found.out_seconds += seconds
        self._window.put(group)
        return group

    def _drop(self, group: WindowGroup) -> None:
        self._found.changes.append((self._at, "dropped", group.key))
        self._window.drop(group)

    def _see_what_has_left(self) -> None:
        while self._leaving and self._gone[self._leaving[0].key] <= self._now:
            self._left()
            self._window.gone()

    def _left(self) -> WindowGroup:
        """The oldest copy out is over, and its source is freed."""
        group = self._leaving.pop(0)
        self._found.changes.append((self._at, "left", group.key))
        return group

    def _carry_out(self, decisions: Iterator[Decision]) -> None:
        for what, group in decisions:
            key = group.key
            if what == "let go":
                self._wait_until(self._gone[self._left().key])
            elif what == "fetch":
                seconds = self._copies[key] / self._link.back
                begins = max(self._now, self._gone[key], self._back_free)
                self._here[key] = self._back_free = begins + seconds
                self._found.back_seconds += seconds
                self._found.changes.append((self._at, "fetched", key))
            else:
                self._wait_until(self._here[key])

    def _wait_until(self, then: float) -> None:
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
        found += [(at, 2, "get", move) for at in move.asked_at]
        found.append((move.dropped_at, 1 if move.dropped_at > move.asked_at[-1] else 3, "drop", move))
    return [(at, kind, move) for at, _, kind, move in sorted(found, key=lambda event: event[:2])]
