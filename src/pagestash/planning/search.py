"""A local search for better candidates: a few layers are changed at a time.

For each of some memory levels T (parts of what is saved at the unplanned peak) the best known candidate is changed:
a *block* takes a home more, or one less, or the choice of another block; or all layers of a group take a home, or
lose it. A block is one layer, and of a large group several that are spread over it. With a price p for a byte too
much, a change is taken if it makes

    seconds on average  +  p × max(0, peak - T)

smaller. Every change is predicted, and everything that was predicted is a candidate for all budgets. Changes are
tried in the order of what they should bring by the sums of their layers; those of a kind that brought nothing come
later. Where no change makes the best better, the best of those that differ from it is changed, too.

How many predictions that takes is given by the size of the step, and not by a clock: a plan is the same each time.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

from pagestash.planning.choices import Choice, Group, toggled
from pagestash.planning.prediction import Cost

MOST, SIZE = 1_440, 571
"""Predictions of the search of a step: `MOST × (SIZE / size)²`, and at most `MOST`, where a step's size is the
number of its segments and saved tensors. A prediction takes longer the larger the step, and so does the search
between two."""
MOST_OF_LAYERS, MOST_OF_ALIKE = 18_000, 720_000
"""Predictions times layers, or other units that repeat: each has copies of its own to play. And times the square of
those that are alike: each has changes of its own to try."""
LEVELS = tuple(part / 20 for part in (19, 17, 15, 13, 11, 10, 9, 8, 7, 6, 5))
"""Memory levels, as parts of the saved bytes at the unplanned peak: closer where a byte costs more."""
SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)
BLOCKS = len(SPREAD)
"""Of a group of alike layers: so many are changed one by one; of more, every eighth together."""
PATIENCE = 25
"""Changes in a row that bring nothing before the next level is looked at."""
APART = 5
"""What differs from the best at a level has so many other homes in its layers."""
PRICE = 2.0
"""Of a byte too much, in times of what a byte costs from the fastest to the smallest candidate."""
DOUBT = 2e-4
"""Part of the step's time: how much better a change must look for each time that its kind brought nothing."""
COPIED, WAITED = 0.1, 0.3
"""Part of its time on the link that a byte is taken to cost, to say which changes are tried first: where all copies
hide, and where compute waits for some."""

Assignment = tuple[Choice, ...]
"""A choice for every unit, in the order of groups."""
Kind = tuple[int, object, bool]
"""Of a change: its group, what is changed, and whether a choice gets longer."""


class Predicted(Protocol):
    """What the search reads of a prediction."""

    @property
    def mean_seconds(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def is_waiting(self) -> bool:
        """Whether compute waits for copies."""


class Pool(Protocol):
    """What was predicted so far."""

    def predict(self, assignment: Assignment) -> Predicted | None:
        """What is predicted; None if the host has too little memory for it."""

    def known(self) -> Sequence[tuple[Assignment, Predicted]]: ...

    @property
    def count(self) -> int:
        """Predictions so far."""


class _Change(NamedTuple):
    """Units that take another choice, and what that should bring: by how much their sums differ."""

    kind: Kind
    units: range
    choices: Sequence[Choice]
    more: Cost


def predictions_for(size: int, layers: int, alike: int) -> int:
    """How many predictions a search is worth in a step of this size, with so many layers, and alike ones."""
    return min(
        MOST,
        MOST * SIZE**2 // max(1, size) ** 2,
        MOST_OF_LAYERS // max(1, layers),
        MOST_OF_ALIKE // max(1, alike) ** 2,
    )


class Search:
    """Looks for better candidates than a pool has."""

    def __init__(
        self,
        groups: Sequence[Group],
        pool: Pool,
        *,
        byte_seconds: float,
        longer: Callable[[Any, Cost], float] | None = None,
    ) -> None:
        self.groups, self.pool = groups, pool
        self.longer = longer or (lambda found, more: more.seconds)
        """How much longer a predicted step takes with so much more, by sums."""
        self.byte_seconds = byte_seconds
        """Of a byte over the link and back."""
        self.units = units_of(groups)
        self.blocks = [blocks_of(units) for units in self.units]
        self.failed: dict[Kind, int] = {}

    def run(self, levels: Sequence[int], predictions: int) -> None:
        """Change what is best at each level below the fastest candidate's peak, from the largest to the smallest
        and back."""
        known = [found for _, found in self.pool.known()]
        fastest = min(known, key=lambda item: (item.mean_seconds, item.peak_bytes))
        smallest = min(known, key=lambda item: (item.peak_bytes, item.mean_seconds))
        freed = max(1, fastest.peak_bytes - smallest.peak_bytes)
        price = PRICE * max(1e-6, smallest.mean_seconds - fastest.mean_seconds) / freed
        below = [level for level in levels if level < fastest.peak_bytes]
        rounds = [*below, *reversed(below)]
        begun = self.pool.count
        for number, level in enumerate(rounds):
            most = (predictions - (self.pool.count - begun)) // (len(rounds) - number)
            if most > 0:
                self._improve(level, price, most)

    def _improve(self, level: int, price: float, most: int) -> None:
        """Change what is best at a level, and then the best of what differs from it, which may lead further."""

        def score(found: Predicted) -> float:
            return found.mean_seconds + price * max(0, found.peak_bytes - level)

        def ranked() -> list[tuple[Assignment, Predicted]]:
            return sorted(self.pool.known(), key=lambda item: (score(item[1]), item[1].peak_bytes))

        begun = self.pool.count
        self._climb(ranked()[0], score, level, price, most)
        (best, _), *others = ranked()
        other = next((item for item in others if len(_homes(item[0]) ^ _homes(best)) >= APART), None)
        if other is not None:
            self._climb(other, score, level, price, most - (self.pool.count - begun))

    def _climb(
        self,
        start: tuple[Assignment, Predicted],
        score: Callable[[Predicted], float],
        level: int,
        price: float,
        most: int,
    ) -> None:
        """Change an assignment until nothing gets better, with so many predictions."""
        current, found = start
        begun, failures, is_better = self.pool.count, 0, True
        while is_better:
            best, is_better = score(found), False
            for change in self._likeliest(current, found, level, price):
                if self.pool.count - begun >= most or failures >= PATIENCE:
                    break
                changed = list(current)
                changed[change.units.start : change.units.stop : change.units.step] = change.choices
                trial = tuple(changed)
                predicted = self.pool.predict(trial)
                is_better = predicted is not None and score(predicted) < best * (1 - 1e-6)
                self._note(change.kind, is_better=is_better)
                if predicted is not None and is_better:
                    current, found, failures = trial, predicted, 0
                    break
                failures += 1

    def _note(self, kind: Kind, *, is_better: bool) -> None:
        failed = self.failed.get(kind, 0)
        self.failed[kind] = max(0, failed - 1) if is_better else failed + 1

    def _likeliest(self, current: Assignment, found: Predicted, level: int, price: float) -> list[_Change]:
        """All changes, what should bring most first."""

        def worse(change: _Change) -> float:
            doubt = DOUBT * self.failed.get(change.kind, 0) * found.mean_seconds
            return self._worse(found, change.more, level, price) + doubt

        return sorted(self._changes(current), key=worse)

    def _worse(self, found: Predicted, more: Cost, level: int, price: float) -> float:
        """How much a score should grow with so much more, by sums."""
        spare = level - found.peak_bytes
        over = max(0, more.kept_bytes - spare) - max(0, -spare)
        link = (WAITED if found.is_waiting else COPIED) * self.byte_seconds
        return self.longer(found, more) + link * more.moved_bytes + price * over

    def _changes(self, current: Assignment) -> Iterator[_Change]:
        for number, (group, blocks) in enumerate(zip(self.groups, self.blocks)):
            for block in blocks:
                for step in group.steps:
                    yield self._change(number, block, step, current, _toggled(current, block, step))
            if len(blocks) > 1:
                yield from self._whole_group(number, self.units[number], current)
            for one, other in pairwise(blocks):
                left, right = current[one[-1]], current[other[0]]
                if left != right:
                    yield self._change(number, one, "as the next", current, [right] * len(one))
                    yield self._change(number, other, "as the one before", current, [left] * len(other))

    def _whole_group(self, number: int, units: range, current: Assignment) -> Iterator[_Change]:
        """All units of a group take some homes, or all lose them: a part of them alone may bring nothing."""
        old = current[units.start : units.stop]
        for step in self.groups[number].steps:
            wanted = set(step)
            having_it = {choice for choice in set(old) if wanted <= set(choice)}
            has = [choice in having_it for choice in old]
            new = _toggled(current, units, step)
            for having in sorted(set(has)):
                choices = [after if own is having else before for before, after, own in zip(old, new, has)]
                yield self._change(number, units, (step, "everywhere", having), current, choices)

    def _change(
        self, number: int, block: range, what: object, current: Assignment, choices: Sequence[Choice]
    ) -> _Change:
        """The change of a block, with its sums."""
        cost = self.groups[number].cost
        before: Choice | None = None
        after: Choice | None = None
        each: list[Cost] = []
        for at, choice in zip(block, choices):
            is_alike = current[at] == before and choice == after  # as neighbours mostly are
            before, after = current[at], choice
            each.append(each[-1] if is_alike else cost(after).minus(cost(before)))
        total = each[0] if len(each) == 1 else Cost(*map(sum, zip(*each)))
        is_longer = len(choices[0]) > len(current[block[0]])
        return _Change((number, what, is_longer), block, choices, total)


def _homes(assignment: Assignment) -> frozenset[tuple[str, str, float]]:
    """Homes that some layer has."""
    return frozenset(item for choice in set(assignment) for item in choice)


def _toggled(current: Assignment, units: range, step: Choice) -> list[Choice]:
    """The choices of these units, each `toggled`."""
    return [toggled(current[at], step) for at in units]


def units_of(groups: Sequence[Group]) -> list[range]:
    """The numbers of each group's units."""
    ends = accumulate((len(group.units) for group in groups), initial=0)
    return [range(*pair) for pair in pairwise(ends)]


def blocks_of(units: range) -> list[range]:
    """Units that change together: each one of a small group; of a large one every eighth.

    Copies of neighbours would come at once, and the time between them is too short. So a large group's blocks are
    in an order in which the first few are spread over it, too.
    """
    if len(units) <= BLOCKS:
        return [range(unit, unit + 1) for unit in units]
    return [units[at::BLOCKS] for at in SPREAD]
