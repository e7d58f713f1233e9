"""What the linear program (`program.py`) proposes, predicted: counts of alike layers, and which layers those are.

It is solved for some memory levels between the smallest and the unplanned one, and for some parts of the link's
rates. Real copies hide less well than their sum says: a window holds few groups, and the last layers' come back at
once. So a part of the rates is what the program counts on.

Which layers: of a few, the earliest take the choice that moves most, because their copies have the longest way
back; then those that recompute most; the last ones keep, because their backward comes first, where memory is at its
most. In a group of many, each choice is *spread* over all layers: copies of neighbours would come at once, and the
time between them is too short.

Many layers take long to predict, and the search (`improve.py`) has few predictions for them. There the part of the
rates matters most, and which is best differs between models. So two levels are *probed* with some parts, with and
without mixes, and the other levels are solved with what was best there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from pagestash.planning.improve import BLOCKS, Assignment
from pagestash.planning.layers import Choice, Group, with_mixes
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.problem import CandidatePool, Problem
from pagestash.planning.program import Counts, Program, uniform
from pagestash.policy import PoolConfig

LEVELS, FEW_LEVELS = 12, 6
"""Memory levels; fewer in a large step, where a prediction takes long. All of the fewer are among the others."""
RATES = (1.0, 0.4, 0.0)
"""Parts of the link's rates. With 0 nothing is moved."""
MIXED_RATES = (1.0, 0.7, 0.4)
"""The same of choices that offload some regions beside recomputed ones."""
MANY_LEVELS = 16
"""Levels of a group of many layers."""
FIRST_RATE, OTHER_RATES = 0.85, (1.0, 0.7, 0.55)
"""Where a level is probed: with the first, with and without mixes; with the others, what was faster of these."""
PROBES = {3: range(6), 8: range(6, MANY_LEVELS)}
"""Levels that are probed, and those that are then solved with what was best there."""


def predict_counts(problem: Problem, pool: CandidatePool, *, few: bool, least: bool) -> None:
    """Predict what the program proposes; less of it with `few` predictions, and of many layers with the `least`."""
    groups = problem.groups
    smallest = [min(range(len(g.costs)), key=lambda at: g.costs[at].kept_bytes) for g in groups]
    # Recomputing may be smaller than it looks by what is kept: it moves nothing, and has no window.
    still = [
        min(range(len(g.costs)), key=lambda at: (g.costs[at].moved_bytes > 0, g.costs[at].kept_bytes))
        for g in groups
    ]
    for chosen in ([0] * len(groups), smallest, still):
        pool.predict(assigned(groups, uniform(groups, chosen)))
    many = has_many(groups)
    unplanned = _unplanned(problem)
    plain, mixed = _Proposals.of(problem, groups, unplanned), None
    if problem.host_bytes > 0 and (many or not few):
        mixed = _Proposals.of(problem, [with_mixes(group) for group in groups], unplanned)
    if not least:
        for each, rates in ((plain, RATES), (mixed, MIXED_RATES)):
            for assignment in () if each is None else each.all(FEW_LEVELS if few else LEVELS, rates):
                pool.predict(assignment)
    if many:
        _probe(pool, [plain] if mixed is None else [plain, mixed])
    problem.exact &= all(each is None or each.program.exact for each in (plain, mixed))


def has_many(groups: Sequence[Group]) -> bool:
    """Whether a group has more layers than a search changes one by one."""
    return any(len(group.units) > BLOCKS for group in groups)


def _unplanned(problem: Problem) -> Prediction:
    """The step without a policy; of a pipeline's rank, one microbatch."""
    own = problem.predictor
    if own is None or own.step is not problem.step:
        own = Predictor(problem.step)
    return own.predict(RuleTable({}, PoolConfig()))


@dataclass(frozen=True, slots=True)
class _Proposals:
    """What a program proposes for groups, with or without their mixes."""

    groups: Sequence[Group]
    program: Program
    least: Counts
    low: float
    high: float

    @classmethod
    def of(cls, problem: Problem, groups: Sequence[Group], unplanned: Prediction) -> "_Proposals":
        program = Program(problem.step, groups, problem.host_bytes, problem.others, unplanned)
        least = program.least()
        high = program.level(uniform(groups, [0] * len(groups)))
        return cls(groups, program, least, program.level(least), high)

    def smallest(self) -> Assignment:
        return assigned(self.groups, self.least)

    def at(self, part: float, rate: float, *, spread: bool = False) -> Assignment | None:
        """For a level that is so far from the smallest to the unplanned one; None if there is nothing for it."""
        counts = self.program.solve(self.low + (self.high - self.low) * part, rate)
        return None if counts is None else assigned(self.groups, counts, spread=spread)

    def all(self, levels: int, rates: Sequence[float]) -> Iterator[Assignment]:
        yield self.smallest()
        for number, rate in product(range(levels), rates):
            found = self.at(number / levels, rate)
            if found is not None:
                yield found


def _probe(pool: CandidatePool, proposals: Sequence[_Proposals]) -> None:
    """Predict two levels with some parts of the rates, and the others with what was best there."""
    for each in proposals:
        pool.predict(each.smallest())
    price = _price(pool)

    def score(level: int, proposal: _Proposals, rate: float) -> float:
        assignment = proposal.at(level / MANY_LEVELS, rate, spread=True)
        found = None if assignment is None else pool.predict_alone(assignment)
        return inf if found is None else found.mean_seconds + price * found.peak_bytes

    for probe, levels in PROBES.items():
        scores = [score(probe, each, FIRST_RATE) for each in proposals]
        best = proposals[scores.index(min(scores))]
        by_rate = {FIRST_RATE: min(scores)} | {rate: score(probe, best, rate) for rate in OTHER_RATES}
        rate = min(by_rate, key=by_rate.__getitem__)
        for level in levels:
            assignment = best.at(level / MANY_LEVELS, rate, spread=True)
            if assignment is not None:
                pool.predict(assignment)


def _price(pool: CandidatePool) -> float:
    """Seconds of a byte: the least at which a known candidate frees half of what any of them does."""
    found = [prediction for _, prediction in pool.known()]
    unplanned = found[0]
    most = max(unplanned.peak_bytes - each.peak_bytes for each in found)
    return min(
        (
            max(0.0, each.mean_seconds - unplanned.mean_seconds) / (unplanned.peak_bytes - each.peak_bytes)
            for each in found
            if unplanned.peak_bytes - each.peak_bytes >= max(1, most / 2)
        ),
        default=0.0,
    )


def assigned(groups: Sequence[Group], counts: Counts, *, spread: bool = False) -> Assignment:
    """The choice of each unit, by counts."""
    chosen: list[Choice] = []
    for group, own in zip(groups, counts):
        order = sorted(
            (at for at in range(len(own)) if own[at]),
            key=lambda at: (-group.costs[at].moved_bytes, -group.costs[at].recomputed_bytes, at),
        )
        # (The n-th of a choice's m layers comes at n / m of the way through them.)
        places = sorted(
            ((number + 0.5) / own[at] if spread else 0.0, place)
            for place, at in enumerate(order)
            for number in range(own[at])
        )
        chosen += [group.choices[order[place]] for _, place in places]
    return tuple(chosen)
