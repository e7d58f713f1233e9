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
from itertools import product
from math import inf

from pagestash.planning.improve import BLOCKS, Assignment
from pagestash.planning.layers import Choice, Group, with_mixes
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.problem import CandidatePool, Problem
from pagestash.planning.program import Counts, Program, uniform
from pagestash.policy import PoolConfig

GRID, COARSE_GRID = 12, 6
"""Memory levels; fewer in a large step, where a prediction takes long. All of the fewer are among the others."""
RATES = (1.0, 0.4, 0.0)
"""Parts of the link's rates. With 0 nothing is moved."""
MIXED_RATES = (1.0, 0.7, 0.4)
"""The same of choices that offload some regions beside recomputed ones."""
PROBED_GRID = 16
"""Levels, where some are probed."""
FIRST_RATE, OTHER_RATES = 0.85, (1.0, 0.7, 0.55)
"""Where a level is probed: with the first, with and without mixes; with the others, what was faster of these."""
PROBES = {3: range(6), 8: range(6, PROBED_GRID)}
"""Levels that are probed, and those that are then solved with what was best there."""


def predict_counts(problem: Problem, pool: CandidatePool, *, few: bool, probed: bool, alone: bool) -> None:
    """Predict what the program proposes; less of it with `few` predictions.

    `probed`: a group has many layers. `alone`: nothing else is tried, and of blocks only what moves nothing.
    """
    groups = problem.groups
    smallest = [min(range(len(g.costs)), key=lambda at: g.costs[at].kept_bytes) for g in groups]
    # Recomputing may be smaller than it looks by what is kept: it moves nothing, and has no window.
    still = [
        min(range(len(g.costs)), key=lambda at: (g.costs[at].moved_bytes > 0, g.costs[at].kept_bytes))
        for g in groups
    ]
    for chosen in ([0] * len(groups), smallest, still):
        pool.predict(assigned(groups, uniform(groups, chosen)))
    unplanned = _unplanned(problem)
    proposals = [_Proposals(problem, groups, RATES, unplanned)]
    if problem.host_bytes > 0 and (probed or not few):
        mixed = [with_mixes(group) for group in groups]
        proposals.append(_Proposals(problem, mixed, MIXED_RATES, unplanned))
    for each in proposals:
        for assignment in each.in_blocks(COARSE_GRID if few else GRID, still=alone):
            pool.predict(assignment)
    if probed:
        _probe(pool, proposals)
    problem.exact &= all(each.program.exact for each in proposals)


def has_many(groups: Sequence[Group]) -> bool:
    """Whether a group has more layers than a search changes one by one."""
    return any(len(group.units) > BLOCKS for group in groups)


def _unplanned(problem: Problem) -> Prediction:
    """The step without a policy; of a pipeline's rank, one microbatch."""
    own = problem.predictor
    if own is None or own.step is not problem.step:
        own = Predictor(problem.step)
    return own.predict(RuleTable({}, PoolConfig()))


class _Proposals:
    """What a program proposes for groups, with or without their mixes."""

    def __init__(
        self, problem: Problem, groups: Sequence[Group], rates: Sequence[float], unplanned: Prediction
    ) -> None:
        self.groups, self.rates = groups, rates
        self.program = Program(problem.step, groups, problem.host_bytes, problem.others, unplanned)
        self.least = self.program.least()
        self.low = self.program.level(self.least)
        self.high = self.program.level(uniform(groups, [0] * len(groups)))

    def in_blocks(self, levels: int, *, still: bool) -> Iterator[Assignment]:
        """For all levels and rates, and the smallest; `still`: only with the rate at which nothing is moved."""
        yield assigned(self.groups, self.least)
        for number, rate in product(range(levels), self.rates):
            counts = self._solve(number, levels, rate) if not (still and rate) else None
            if counts is not None:
                yield assigned(self.groups, counts)

    def spread(self, number: int, rate: float) -> Assignment | None:
        """For one of the levels of `PROBED_GRID`; None if there is nothing for it."""
        counts = self._solve(number, PROBED_GRID, rate)
        return None if counts is None else assigned(self.groups, counts, spread=True)

    def _solve(self, number: int, levels: int, rate: float) -> Counts | None:
        return self.program.solve(self.low + (self.high - self.low) * number / levels, rate)


def _probe(pool: CandidatePool, proposals: Sequence[_Proposals]) -> None:
    """Predict two levels with some parts of the rates, and the others with what was best there."""
    price = _price(pool)

    def score(level: int, proposal: _Proposals, rate: float) -> float:
        assignment = proposal.spread(level, rate)
        found = None if assignment is None else pool.predict_alone(assignment)
        return inf if found is None else found.mean_seconds + price * found.peak_bytes

    for probe, levels in PROBES.items():
        scores = [score(probe, each, FIRST_RATE) for each in proposals]
        best = proposals[scores.index(min(scores))]
        by_rate = {FIRST_RATE: min(scores)} | {rate: score(probe, best, rate) for rate in OTHER_RATES}
        rate = min(by_rate, key=by_rate.__getitem__)
        for level in levels:
            assignment = best.spread(level, rate)
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
    """The choice of each unit, by counts; `spread`: those of large groups."""
    chosen: list[Choice] = []
    for group, own in zip(groups, counts):
        order = sorted(
            (at for at in range(len(own)) if own[at]),
            key=lambda at: (-group.costs[at].moved_bytes, -group.costs[at].recomputed_bytes, at),
        )
        spreads = spread and len(group.units) > BLOCKS
        # (Each of a choice's layers comes in the middle of its share of all.)
        places = sorted(
            ((number + 0.5) / own[at] if spreads else 0.0, place)
            for place, at in enumerate(order)
            for number in range(own[at])
        )
        chosen += [group.choices[order[place]] for _, place in places]
    return tuple(chosen)
