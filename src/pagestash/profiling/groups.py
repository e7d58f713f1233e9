"""Which saved tensors of a measured step move together under a policy's offload rules: the keeper's groups.

A group has entries, each a range of bytes of one storage. Which entry a tensor belongs to is decided as in
`saved/entries.py`, which of them leave under a `fraction` by the keeper's own rule (`saved/offload/split.py`).
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from pagestash.policy import HomeName, Rule
from pagestash.profiling.assign import Rules, rule_of
from pagestash.profiling.records import SavedTensor, Segment
from pagestash.saved.offload.plan import Key
from pagestash.saved.offload.split import EntryShape, RowSplit, mean_rows
from pagestash.saved.storage import SPARSE


class Slice(NamedTuple):
    """A thin slice of a storage: its elements are copied when it is saved, and spread again when asked for."""

    storage: int
    bytes: int
    span_bytes: int
    """Bytes of the storage from its first to its last element."""
    saved_at: int
    needed_at: int


class Move(NamedTuple):
    """One group: when its region ends, when backward first needs it, and when backward is done with it."""

    key: Key
    ready: float
    needed: float
    bytes: int
    """Bytes copied each way."""
    device_bytes: int
    """Of the entries that leave."""
    kept_bytes: int
    """Of those that do not, by its rule's `fraction`."""
    window: int | None
    """Its rule's `prefetch_bytes`."""
    storages: tuple[int, ...]
    """Those of its entries."""
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
    request: int = 0
    """The number of the first request, of all that backward makes."""
    slices: tuple[Slice, ...] = ()
    """Thin slices that it has beside its entries."""


class Timeline:
    """When the segments of a step end, and with which of them a region ends: the same for every policy."""

    def __init__(self, segments: Sequence[Segment], seconds: Iterable[float] | None = None) -> None:
        """`seconds` of each segment, if not those that it has."""
        self.ends = list(
            accumulate(segment.seconds for segment in segments) if seconds is None else accumulate(seconds)
        )
        self._segments = segments
        self._last: dict[tuple[int, str], int] = {}

    def last(self, start: int, name: str) -> int:
        """The last segment of the region that was running in segment `start`."""
        found = self._last.get((start, name))
        if found is None:
            found = self._last[start, name] = _last_segment(self._segments, start, name)
        return found


def moves_of(
    policy: Rules,
    tensors: Sequence[SavedTensor],
    homes: Sequence[HomeName],
    timeline: Timeline,
    positions: Mapping[str, Key] = MappingProxyType({}),
    replayed: Mapping[int, Mapping[str, tuple[int, int]]] = MappingProxyType({}),
) -> list[Move]:
    """The groups that leave. When a region ends, what a fused operation claims in it leaves together, and then what
    else it saved; each returns together.

    Under a schedule, `positions` has the stage and the microbatch of each region. `replayed` has, by storage and by
    the region with which an input of a replay moves, the segment in which a replay asks for it, and the number of
    the request. (Where that region has no entry of the storage, the input is in that of another.)
    """
    if "offload" not in homes:
        return []
    found = _Groups()
    names: dict[tuple[str, ...], str] = {}
    for tensor, home in zip(tensors, homes):
        if home == "offload":
            path = tensor.path
            if path not in names:
                # (An input of a recomputed region moves with the region around.)
                _, names[path] = rule_of(policy, path, skip="recompute")
            name = names[path]
            # (For a module without a rule only valid rows are claimed.)
            own = not tensor.claimed or not (tensor.has_rows or name == path[-1])
            # It leaves with the innermost region that has a rule or is no module.
            until = tensor.block if tensor.block and tensor.block in path[path.index(name) :] else name
            found.add(tensor, _Group(timeline.last(tensor.saved_at, until), own, name))
    rules = {where.name: rule for where in found.groups if (rule := policy.rule_for(where.name)) is not None}
    split = RowSplit(_expected_rows((rules[where.name], own) for where, own in found.groups.items()))
    ends, moves = timeline.ends, []
    holders = {(entry.storage, where.name) for where, own in found.groups.items() for entry in own}

    def order(group: tuple[_Group, list[_Entry]]) -> tuple[int, bool, int]:
        where, entries = group
        return where.last, where.own, 0 if where.own else entries[0].tensor.claim

    for where, entries in sorted(found.groups.items(), key=order):
        last, own, name = where
        split.go_on_with(positions[name][1] if name in positions else 0)
        rule = rules[name]
        whole = rule.fraction == 1.0  # then an entry without spare rows leaves, and nothing is owed
        shares = [
            entry.length if whole and not _has_spare_rows(entry.tensor) else split.share(rule, entry.shape)
            for entry in entries
        ]
        asked = sorted([_first_request(entry.tensors, name, replayed, holders) for entry in entries])
        thin, others = ([entry for entry in entries if entry.thin is thin] for thin in (True, False))
        storages = tuple(dict.fromkeys([entry.storage for entry in others]))
        kept = [entry for entry, share in zip(entries, shares) if not share]
        kept_bytes = sum([entry.length for entry in kept])
        moves.append(
            Move(
                key=(*positions.get(name, ()), name, 2 * last + own),
                ready=ends[last],
                needed=ends[asked[0][0] - 1],
                bytes=sum(shares),
                device_bytes=sum([entry.length for entry in entries]) - kept_bytes,
                kept_bytes=kept_bytes,
                window=rule.prefetch_bytes,
                storages=storages,
                leaving=frozenset(storages).difference([entry.storage for entry in kept]),
                put_at=last + 1,
                asked_at=tuple([at for at, _ in asked]),
                dropped_at=1 + max([tensor.done_at for entry in entries for tensor in entry.tensors]),
                own=own,
                request=asked[0][1],
                slices=tuple([_slice(entry.tensor) for entry in thin]),
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


@dataclass(slots=True, eq=False)
class _Entry:
    """Bytes `first` to `last` of a storage, and the tensors that have some of them and were saved into it.

    (Others that have them may be kept: what a region without a rule has saved is kept for those after it, too.)
    """

    tensors: list[SavedTensor]
    first: int
    last: int
    covered: int
    thin: bool = False
    """Whether it is a thin slice, whose elements are copied."""

    @property
    def tensor(self) -> SavedTensor:
        """The first of them."""
        return self.tensors[0]

    @property
    def storage(self) -> int:
        return self.tensor.storage

    @property
    def length(self) -> int:
        return self.covered if self.thin else self.last - self.first

    @property
    def shape(self) -> EntryShape:
        """What the keeper's split sees; with rows where the measured step did not fill all of them."""
        length = self.length
        rows = self.tensor.shape[0] if _has_spare_rows(self.tensor) else 0
        return EntryShape(length, rows if rows and not length % rows else 0)


class _Groups:
    """Finds the entry of each tensor, in the order of forward."""

    def __init__(self) -> None:
        self.groups: dict[_Group, list[_Entry]] = {}
        self._known: dict[int, list[tuple[_Group, _Entry]]] = {}

    def add(self, tensor: SavedTensor, where: _Group) -> None:
        """As `Entries.find` does, and the hook that packs a thin slice."""
        known = self._known.setdefault(tensor.storage, [])
        first, last = tensor.span
        if _has_spare_rows(tensor):
            first, last = 0, tensor.storage_bytes
        elif tensor.is_thin and not any(
            group == where and max(entry.last, last) - min(entry.first, first) - entry.length < tensor.bytes
            for group, entry in known
        ):
            members = self.groups.setdefault(where, [])
            for entry in members:
                if entry.thin and (entry.storage, entry.first, entry.last) == (tensor.storage, first, last):
                    entry.tensors.append(tensor)
                    return
            members.append(_Entry([tensor], first, last, tensor.bytes, thin=True))
            self._join_slices(tensor.storage, where)
            return
        first -= first % 16
        for group, entry in known:
            if entry.first <= first and last <= entry.last:
                entry.tensors.append(tensor)
                return
            low, high = min(entry.first, first), max(entry.last, last)
            if group == where and high - low <= entry.covered + last - first:
                entry.first, entry.last, entry.covered = low, high, entry.covered + last - first
                entry.tensors.append(tensor)
                return
        entry = _Entry([tensor], first, last, last - first)
        known.append((where, entry))
        self.groups.setdefault(where, []).append(entry)

    def _join_slices(self, storage: int, where: _Group) -> None:
        """Slices that are together most of what they span are one entry."""
        found = [entry for entry in self.groups[where] if entry.thin and entry.storage == storage]
        low, high = min(entry.first for entry in found), max(entry.last for entry in found)
        if len(found) > 1 and high - low <= SPARSE * sum(entry.covered for entry in found):
            low -= low % 16
            joined = _Entry([tensor for entry in found for tensor in entry.tensors], low, high, high - low)
            self._known[storage].append((where, joined))
            self.groups[where] = [
                joined if entry is found[0] else entry
                for entry in self.groups[where]
                if entry not in found[1:]
            ]


def _has_spare_rows(tensor: SavedTensor) -> bool:
    """Whether the measured step left some of its rows unfilled. (A slice spans what it has, or more.)"""
    return tensor.valid_bytes < tensor.bytes and bool(tensor.shape)


def _first_request(
    tensors: Sequence[SavedTensor],
    name: str,
    replayed: Mapping[int, Mapping[str, tuple[int, int]]],
    holders: Container[tuple[int, str]],
) -> tuple[int, int]:
    """The segment that first asks for one of an entry's tensors, or for a replay, and the request's number."""
    storage, first = tensors[0].storage, min([tensor.asked for tensor in tensors])
    for around, when in replayed.get(storage, {}).items():
        if around == name or (storage, around) not in holders:
            first = min(first, when)
    return first


def _slice(tensor: SavedTensor) -> Slice:
    first, last = tensor.span
    return Slice(tensor.storage, tensor.bytes, last - first, tensor.saved_at, tensor.asked[0])


def _expected_rows(groups: Iterable[tuple[Rule, Sequence[_Entry]]]) -> dict[tuple[str, int], float]:
    """Valid rows that the keeper expects, by a rule's pattern and the capacity of its tensors."""
    found: dict[tuple[str, int], list[int]] = {}
    for rule, entries in groups:
        for entry in entries:
            if _has_spare_rows(entry.tensor) and (shape := entry.shape).capacity:
                rows = entry.tensor.valid_bytes // shape.row_bytes
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
