"""The candidates of a plan: ways to give each layer a choice, each predicted.

What one would write by hand comes first: so no plan is slower than that, and what fits by hand is never refused.
Where there are few ways in all, all of them are predicted. Else every choice is predicted for a whole group, then
mixes of neighbouring choices (`mixes.py`), and a local search (`search.py`) goes on from there.

Nothing of this depends on the budget, so more memory never makes a plan slower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from pagestash.planning.alternatives import by_hand
from pagestash.planning.choices import Group, Unit, find_groups, least_bytes_of, rules_of
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.mixes import Point, front_of, mixes
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.search import LEVELS, Assignment, Search, predictions_for, units_of
from pagestash.policy import HOMES, PoolConfig, Rule
from pagestash.profiling.progress import Tell, tell_nobody

EXHAUSTIVE, EXHAUSTIVE_ON_A_RANK = 2_000, 900
"""So many ways to give each layer a choice are all predicted. A rank of a pipeline is planned many times."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Rules by region, and what is predicted for them."""

    rules: dict[str, Rule]
    predicted: Prediction


def unbeaten(found: Sequence[Candidate]) -> list[Candidate]:
    """Of candidates, the fastest first, those that take less memory than all faster ones."""
    front: list[Candidate] = []
    for item in found:
        if not front or item.predicted.peak_bytes < front[-1].predicted.peak_bytes:
            front.append(item)
    return front


def in_order(found: Sequence[Candidate]) -> list[Candidate]:
    """The fastest first."""
    return sorted(found, key=lambda item: (item.predicted.mean_seconds, item.predicted.peak_bytes))


@dataclass(slots=True)
class Problem:
    """A measured step, its groups, and the host memory that offload may take."""

    step: MeasuredStep
    host_bytes: int
    groups: list[Group] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    least_bytes: int = 0
    predictor: Predictor | None = None
    """What candidates are predicted with; None: the step itself."""

    def __post_init__(self) -> None:
        self.least_bytes = least_bytes_of(self.step.profile)
        self.groups = find_groups(self.step, host=self.host_bytes > 0, least_bytes=self.least_bytes)
        self.units = [unit for group in self.groups for unit in group.units]

    def rules(self, assignment: Assignment) -> dict[str, Rule]:
        """The rules of all units, by the choice of each."""
        found: dict[str, Rule] = {}
        for unit, choice in zip(self.units, assignment):
            found.update(rules_of(unit, choice, self.least_bytes))
        return found

    def candidates(self, tell: Tell = tell_nobody) -> list[Candidate]:
        """All candidates, the fastest first; one of them keeps everything."""
        pool = _Predicted(self, tell)
        for rules in by_hand(self.step.profile, self.host_bytes).values():  # the first ones keep
            pool.predict(self._by_unit(rules))
            pool.predict_rules(rules)
        is_rank = pool.predictor.step.count != self.step.count
        most = EXHAUSTIVE_ON_A_RANK if is_rank else EXHAUSTIVE
        ways = prod(len(group.choices) ** len(group.units) for group in self.groups)
        if ways <= most:
            pool.total = ways
            for assignment in product(*(group.choices for group in self.groups for _ in group.units)):
                pool.predict(assignment)
        else:
            worth = pool.worth // (8 if is_rank else 1)
            pool.total = sum(len(group.choices) for group in self.groups) + worth
            mixed = list(self._mixed(pool))
            pool.total += len(mixed)
            for assignment in mixed:
                pool.predict(assignment)
            self._search(pool, worth)
        return in_order(pool.candidates)

    def _by_unit(self, rules: dict[str, Rule]) -> Assignment:
        """The rules of regions that a unit has choices for, from which a search can go on."""
        return tuple(
            tuple(
                sorted(
                    (unit.inner(region), rules[region.name].home, 1.0)
                    for region in unit.regions
                    if region.name in rules
                )
            )
            for unit in self.units
        )

    def _mixed(self, pool: "_Predicted") -> Iterator[Assignment]:
        """Mixes down two fronts of each group: as predicted, and by sums where compute waits for every copy."""
        link = self.step.profile.link
        byte_seconds = 1 / link.out + 1 / link.back
        predicted, waiting = list[list[Point]](), list[list[Point]]()
        for group, units in zip(self.groups, units_of(self.groups)):
            predicted.append([])
            for choice in group.choices:
                found = pool.predict(tuple(choice if at in units else () for at in range(len(self.units))))
                if found is not None:  # the host has memory for it
                    predicted[-1].append(Point(found.mean_seconds, found.peak_bytes, choice))
            waiting.append(
                [
                    Point(cost.seconds + byte_seconds * cost.moved_bytes, cost.kept_bytes, choice)
                    for choice, cost in zip(group.choices, group.costs)
                ]
            )
        for points in (predicted, waiting):
            for spread in (False, True):
                yield from mixes(self.groups, [front_of(own) for own in points], spread=spread)

    def _search(self, pool: "_Predicted", predictions: int) -> None:
        unplanned = pool.known()[0][1]
        saved = sum(unplanned.at_peak()[home] for home in HOMES)
        levels = [unplanned.peak_bytes - round((1 - part) * saved) for part in LEVELS]
        link, longer = self.step.profile.link, Prediction.longer if pool.predictor.step.ahead else None
        Search(self.groups, pool, byte_seconds=1 / link.out + 1 / link.back, longer=longer).run(
            levels, predictions
        )


class _Predicted:
    """All that was predicted."""

    def __init__(self, problem: Problem, tell: Tell) -> None:
        self.problem, self._tell = problem, tell
        self.total = 0
        """About so many predictions are to come in all."""
        self.predictor = problem.predictor or Predictor(problem.step)
        self.candidates: list[Candidate] = []
        self._known: list[tuple[Assignment, Prediction]] = []
        self._by_key: dict[frozenset[str], Prediction | None] = {}

    @property
    def count(self) -> int:
        """Predictions so far."""
        return len(self._by_key)

    @property
    def worth(self) -> int:
        """How many predictions a search is worth."""
        step, problem = self.predictor.step, self.problem
        alike = max((len(group.units) for group in problem.groups), default=0)
        return predictions_for(step.count + len(step.profile.tensors), len(problem.units), alike)

    def known(self) -> Sequence[tuple[Assignment, Prediction]]:
        return self._known

    def predict(self, assignment: Assignment) -> Prediction | None:
        """What is predicted; None if the host has too little memory for it."""
        return self.predict_rules(self.problem.rules(assignment), assignment)

    def predict_rules(
        self, rules: dict[str, Rule], assignment: Assignment | None = None
    ) -> Prediction | None:
        """The same for rules. Without an assignment they may name what no unit has a choice for: no search begins
        from them."""
        key = frozenset(f"{name} {rule.home} {rule.fraction}" for name, rule in rules.items())
        if key not in self._by_key:
            found = self.predictor.predict(RuleTable(rules, PoolConfig()))
            fits_host = found.host_bytes <= self.problem.host_bytes
            self._by_key[key] = found if fits_host else None
            self._tell("predicting policies", self.count, self.total)
            if fits_host:
                self.candidates.append(Candidate(rules, found))
                if assignment is not None:
                    self._known.append((assignment, found))
        return self._by_key[key]
