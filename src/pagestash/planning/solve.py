"""The candidates of a plan: for each group of alike layers, how many of them take which choice.

Counts are proposed by a linear program (`program.py`), once for each of `GRID` memory targets between the smallest
and the unplanned peak, and for each of `RATES` of the link. Every candidate is predicted (`predict.py`), and a plan
is chosen by what is predicted. The candidates do not depend on the budget, so more memory never makes a plan
slower. Pairs of choices are candidates beside the counts (`pairs.py`). If there are at most `EXHAUSTIVE` ways to
give each layer a choice, all are candidates.

Which layers: the earliest take the choice that moves most, because their copies have the longest way back; then
those that recompute most; the last ones keep, because their backward comes first, where memory is at its most.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from pagestash.planning.layers import Group, find_groups, least_bytes_of, rules_of
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.pairs import likely_pairs
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.program import Counts, Program, uniform
from pagestash.policy import PoolConfig, Rule

GRID = 10
RATES = (1.0, 0.4, 0.0)
"""Parts of the link's rates that the program counts on. Real copies hide less well than their sum says: a window
holds few groups, and the last layers' come back at once. With 0 nothing is moved."""
EXHAUSTIVE = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """Rules by region, and what is predicted for them."""

    rules: dict[str, Rule]
    predicted: Prediction


@dataclass(slots=True)
class Problem:
    """A measured step, its groups, and the host memory that offload may take."""

    step: MeasuredStep
    host_bytes: int
    groups: list[Group] = field(default_factory=list)
    least_bytes: int = 0
    exact: bool = True
    """Whether counts are solved for; False without scipy."""
    predictor: Predictor | None = None
    """What candidates are predicted with; None: the step itself."""
    others: Callable[[str], int] = lambda unit: 0
    """Under a schedule: how many more microbatches of a unit are in flight."""

    def __post_init__(self) -> None:
        self.least_bytes = least_bytes_of(self.step.profile)
        self.groups = find_groups(self.step, host=self.host_bytes > 0, least_bytes=self.least_bytes)

    def rules(self, counts: Counts) -> dict[str, Rule]:
        """The rules of all units, by counts."""
        chosen = []
        for group, own in zip(self.groups, counts):
            order = sorted(
                range(len(own)),
                key=lambda at: (-group.costs[at].moved_bytes, -group.costs[at].recomputed_bytes, at),
            )
            chosen.append([at for at in order for _ in range(own[at])])
        return self.rules_of_units(chosen)

    def rules_of_units(self, chosen: Sequence[Sequence[int]]) -> dict[str, Rule]:
        """The rules of all units, by the number of each one's choice."""
        found: dict[str, Rule] = {}
        for group, numbers in zip(self.groups, chosen):
            for unit, at in zip(group.units, numbers):
                found.update(rules_of(unit, group.choices[at], self.least_bytes))
        return found


def candidates(problem: Problem) -> list[Candidate]:
    """All candidates, the fastest first; one of them keeps everything."""
    predictor = problem.predictor or Predictor(problem.step)
    found: dict[frozenset[str], Candidate] = {}
    tried: set[frozenset[str]] = set()
    for rules in _proposals(problem):
        if (key := _key(rules)) not in tried:
            tried.add(key)
            item = _predicted(rules, predictor)
            if item.predicted.host_bytes <= problem.host_bytes:
                found.setdefault(_key(item.rules), item)
    return sorted(found.values(), key=lambda item: (item.predicted.seconds, item.predicted.peak_bytes))


def _key(rules: dict[str, Rule]) -> frozenset[str]:
    return frozenset(f"{name} {rule.home}" for name, rule in rules.items())


def _predicted(rules: dict[str, Rule], predictor: Predictor) -> Candidate:
    """A candidate, without rules that would move nothing if nothing is worse without them."""
    predicted = predictor.predict(RuleTable(rules, PoolConfig()))
    fewer = {name: rule for name, rule in rules.items() if name not in predicted.staying}
    if len(fewer) < len(rules):
        again = predictor.predict(RuleTable(fewer, PoolConfig()))
        if again.seconds <= predicted.seconds and again.peak_bytes <= predicted.peak_bytes:
            return Candidate(fewer, again)
    return Candidate(rules, predicted)


def _proposals(problem: Problem) -> Iterator[dict[str, Rule]]:
    groups = problem.groups
    if prod(len(group.choices) ** len(group.units) for group in groups) <= EXHAUSTIVE:
        ways = (product(range(len(group.choices)), repeat=len(group.units)) for group in groups)
        yield from map(problem.rules_of_units, product(*ways))
    else:
        yield from map(problem.rules, _by_counts(problem))
        yield from _mixed(problem)


def _mixed(problem: Problem) -> Iterator[dict[str, Rule]]:
    """The earliest so many layers take one choice and the others another; both may offload a part of a layer.

    The program sees no difference between a layer that moves all of its bytes and two that move half of theirs. But
    copies of the first hide less well: they come at once, and the next layer's forward is too short for them.
    """
    if not problem.host_bytes or not problem.groups:
        return
    main = max(problem.groups, key=lambda group: len(group.units) * group.costs[0].kept_bytes)
    step = problem.step
    units = sorted(
        (unit for group in problem.groups if group.mixes for unit in group.units),
        key=lambda unit: (step.span(unit.name) or (0, 0))[0],
    )
    for first, second, count in likely_pairs(main.mixes, len(units), step):
        rules: dict[str, Rule] = {}
        for number, unit in enumerate(units):
            inner = {unit.inner(region) for region in unit.regions}
            choice = first if number < count else second
            own = tuple(item for item in choice if item[0] in inner)
            rules.update(rules_of(unit, own, problem.least_bytes))
        yield rules


def _by_counts(problem: Problem) -> Iterator[Counts]:
    groups = problem.groups
    yield uniform(groups, [0] * len(groups))
    smallest = [min(range(len(g.costs)), key=lambda at: g.costs[at].kept_bytes) for g in groups]
    yield uniform(groups, smallest)
    # Recomputing may be smaller than it looks by what is kept: it moves nothing, and has no window.
    still = [
        min(range(len(g.costs)), key=lambda at: (g.costs[at].moved_bytes > 0, g.costs[at].kept_bytes))
        for g in groups
    ]
    yield uniform(groups, still)
    program = Program(problem.step, groups, problem.host_bytes, problem.others)
    least = program.least()
    yield least
    low, high = program.level(least), program.level(uniform(groups, [0] * len(groups)))
    for number, rate in product(range(GRID), RATES):
        counts = program.solve(low + (high - low) * number / GRID, rate)
        if counts is not None:
            yield counts
    problem.exact = program.exact
