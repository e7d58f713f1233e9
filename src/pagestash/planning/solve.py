"""The candidates of a plan: for each group of alike layers, how many of them take which choice.

Counts are proposed by a linear program (`counts.py`). Every candidate is predicted (`predict.py`), and a plan is
chosen by what is predicted. The candidates do not depend on the budget, so more memory never makes a plan slower.
Beside the counts, candidates are pairs of choices (`pairs.py`), what a search finds from there (`improve.py`), and
each choice for all layers; not so in steps of many layers that take long to predict. If there are at most
`EXHAUSTIVE` ways to give each layer a choice, all are candidates: three layers of two regions, say.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from operator import attrgetter

from pagestash.planning.alternatives import by_hand
from pagestash.planning.counts import has_many, predict_counts
from pagestash.planning.improve import LEVELS, Assignment, Search, by_seconds
from pagestash.planning.lanes import SLOW_STEPS
from pagestash.planning.layers import Group
from pagestash.planning.pairs import likely_pairs
from pagestash.planning.prediction import Prediction
from pagestash.planning.problem import Candidate, CandidatePool, Problem
from pagestash.policy import HOMES

EXHAUSTIVE, EXHAUSTIVE_ON_A_RANK = 2_000, 900
"""So many ways to give each layer a choice are all predicted. A rank of a pipeline is planned many times."""
FEW, LEAST = 180, 40
"""Predictions: where a search is worth fewer, fewer counts, pairs, and choices for all layers are tried beside it.
Where it is worth less than the least, of many layers only counts are tried, and what one writes by hand."""


def candidates(problem: Problem) -> list[Candidate]:
    """All candidates, the fastest first; one of them keeps everything."""
    pool = CandidatePool(problem)
    _predict_by_hand(problem, pool)
    most = EXHAUSTIVE if _is_one_step(problem, pool) else EXHAUSTIVE_ON_A_RANK
    if prod(len(group.choices) ** len(group.units) for group in problem.groups) <= most:
        for assignment in product(*(group.choices for group in problem.groups for _ in group.units)):
            pool.predict(assignment)
    else:
        few = pool.worth < FEW
        probed = problem.host_bytes > 0 and has_many(problem.groups)
        alone = probed and pool.worth < LEAST
        predict_counts(problem, pool, few=few, probed=probed, alone=alone)
        if not (alone and problem.exact):
            for assignment in _mixed(problem, 1 if few else 4):
                pool.predict(assignment)
            _improve(problem, pool)
            for assignment in _alike(problem, moving=not few):
                pool.predict(assignment)
    return sorted(pool.candidates, key=lambda item: (item.predicted.mean_seconds, item.predicted.peak_bytes))


def _is_one_step(problem: Problem, pool: CandidatePool) -> bool:
    """Whether a prediction is of one forward and backward, and not of all microbatches of a rank."""
    return pool.predictor.step.count == problem.step.count


def _predict_by_hand(problem: Problem, pool: CandidatePool) -> None:
    """What one would write without a plan: no plan is slower, and what fits by hand is never refused.

    It is predicted for the units that have choices, from which a search can go on, and as a whole.
    """
    for rules in by_hand(problem.step.profile, problem.host_bytes).values():  # the first ones keep
        pool.predict(
            tuple(
                tuple(
                    sorted(
                        (unit.inner(region), rules[region.name].home, 1.0)
                        for region in unit.regions
                        if region.name in rules
                    )
                )
                for unit in problem.units
            )
        )
        pool.predict_rules(rules)


def _improve(problem: Problem, pool: CandidatePool) -> None:
    link = problem.step.profile.link
    unplanned = pool.known()[0][1]
    saved = sum(unplanned.at_peak()[home] for home in HOMES)
    levels = [unplanned.peak_bytes - round((1 - part) * saved) for part in LEVELS]
    # A rank of a pipeline is planned many times, once for each way to place layers.
    share = 1 if _is_one_step(problem, pool) else 4
    # What is fast on average is found sooner from what is fast on a quick host, unless the sums know of the host.
    step = pool.predictor.step
    varies = any(step.lanes.host) or (problem.host_bytes > 0 and step.slow_link != link)
    slow_steps = {"seconds": 0.0, "mean_seconds": SLOW_STEPS} if varies else {"seconds": 0.0}

    def search(cost: str) -> Search:
        return Search(
            problem.groups,
            pool,
            byte_seconds=1 / link.out + 1 / link.back,
            cost=attrgetter(cost),
            longer=partial(Prediction.longer, slow_steps=slow_steps[cost]) if step.ahead else by_seconds,
        )

    each = pool.worth // share // (len(slow_steps) + 2)
    for cost in reversed(slow_steps) if step.ahead else slow_steps:
        search(cost).run(levels, each)
    *_, average = slow_steps  # the last one
    search(average).cross(levels, each)
    search(average).run(levels, each)


def _alike(problem: Problem, *, moving: bool) -> Iterator[Assignment]:
    """Each choice of the largest group in all layers that have it, those that move something only if `moving`.

    The program may take it for too large, and a search may never come there.
    """
    groups = problem.groups
    main = main_group(groups)
    for choice, cost in zip(main.choices, main.costs):
        if moving or not cost.moved_bytes:
            yield tuple(choice if choice in group.choices else () for group in groups for _ in group.units)


def main_group(groups: Sequence[Group]) -> Group:
    """The group that saves most."""
    return max(groups, key=lambda group: len(group.units) * group.costs[0].kept_bytes)


def _mixed(problem: Problem, each: int) -> Iterator[Assignment]:
    """The earliest so many layers take one choice and the others another; both may offload a part of a layer.

    The program sees no difference between a layer that moves all of its bytes and two that move half of theirs. But
    copies of the first hide less well: they come at once, and the next layer's forward is too short for them.
    """
    if not problem.host_bytes or not problem.groups:
        return
    main = main_group(problem.groups)
    step = problem.step
    mixed = {unit.name for group in problem.groups if group.mixes for unit in group.units}
    order = sorted(mixed, key=lambda name: (step.span(name) or (0, 0))[0])
    places = {name: number for number, name in enumerate(order)}
    # (Of layers of another group, which may lack a region, or a home for it.)
    can = [
        {(unit.inner(region), home) for region in unit.regions for home in region.homes}
        for unit in problem.units
    ]
    for first, second, count in likely_pairs(main.mixes, len(order), step, each):
        chosen = [
            first if places.get(unit.name, 0) < count else second if unit.name in places else ()
            for unit in problem.units
        ]
        yield tuple(
            tuple(item for item in choice if item[:2] in own) if unit.name in places else ()
            for unit, choice, own in zip(problem.units, chosen, can)
        )
