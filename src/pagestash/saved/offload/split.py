"""How many of an entry's bytes leave the device: all of a tensor or none, or a valid-row tensor's leading rows.

The copy engine takes its sizes from the host, and only the device knows how many rows are valid. So a valid-row
tensor is split at a fixed row, `fraction` of the rows that are expected. If fewer are valid, some garbage travels,
harmlessly. If more are, they wait in pages.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from pagestash.policy import Rule
from pagestash.saved.storage import Entry

MOSTLY = 0.8


class EntryShape(NamedTuple):
    """What an entry looks like to the split: its bytes, and its rows where only some may be valid."""

    length: int
    capacity: int = 0

    @property
    def row_bytes(self) -> int:
        return self.length // self.capacity

    @classmethod
    def of(cls, entry: Entry) -> "EntryShape":
        return cls(entry.last - entry.first, 0 if entry.rows is None else entry.capacity)


def mean_rows(found: Mapping[tuple[str, int], Sequence[int]]) -> dict[tuple[str, int], float]:
    """What a `RowSplit` expects, by what was found: rows vary from step to step as from layer to layer."""
    return {which: sum(rows) / len(rows) for which, rows in found.items()}


class RowSplit:
    """Decides on one entry after the other, so that `fraction` of a rule's bytes leave, to within one tensor.

    This holds for each microbatch.
    """

    def __init__(self, expected: Mapping[tuple[str, int], float]) -> None:
        self.expected = expected
        """Valid rows that are expected, by a rule's pattern and the capacity of its tensors."""
        self._owed_of: dict[Hashable, dict[str, float]] = {}
        self._owed: dict[str, float] = {}
        """Bytes that are still to leave of a microbatch, by a rule's pattern."""

    def start(self) -> None:
        """A step begins, which decides as the last one did."""
        self._owed_of.clear()

    def go_on_with(self, microbatch: Hashable) -> None:
        """The next entries are of this microbatch, which decides as all others do.

        If what is owed went on to the next one, a tensor that leaves in one microbatch would stay in the next, and
        memory would peak there. A pipeline's rank may go on with a microbatch in another of its stages.
        """
        self._owed = self._owed_of.setdefault(microbatch, {})

    def mostly_valid(self, rule: Rule, shape: EntryShape) -> bool:
        """Whether so many rows are valid that pages would free little: it goes or stays as a whole."""
        expected = self.expected.get((rule.match, shape.capacity), 0.0)
        return expected >= MOSTLY * shape.capacity

    def share(self, rule: Rule, shape: EntryShape) -> int:
        """Bytes from the start of the entry that leave the device."""
        if shape.capacity and not self.mostly_valid(rule, shape):
            expected = self.expected.get((rule.match, shape.capacity), 0.0)
            rows = min(int(rule.fraction * expected), shape.capacity)
            share = rows * shape.row_bytes
            return share if share >= rule.least_bytes else 0
        owed = self._owed.get(rule.match, 0.0) + rule.fraction * shape.length
        # Half a tensor owed is enough: the bytes that leave stay nearest to the fraction.
        share = shape.length if owed >= shape.length / 2 and rule.fraction else 0
        self._owed[rule.match] = owed - share
        return share


def rows_behind(entry: Entry, share: int) -> Entry:
    """The rows of a valid-row entry behind its first `share` bytes, as an entry of its own."""
    assert entry.rows is not None
    lead = share // (entry.length // entry.capacity)
    rows = (entry.rows.detach() - lead).clamp_(min=0)
    return Entry(
        storage=entry.storage,
        version=entry.version,
        first=entry.first + share,
        last=entry.last,
        origin=entry.origin,
        rows=rows,
        rows_version=rows._version,
        capacity=entry.capacity - lead,
        region=entry.region,
        rule=entry.rule,
    )
