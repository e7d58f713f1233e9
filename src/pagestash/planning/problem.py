"""What a plan is searched for: a measured step, its groups of layers, and all that was predicted for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagestash.planning.improve import Assignment, predictions_for
from pagestash.planning.layers import Group, Unit, find_groups, least_bytes_of, rules_of
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.policy import PoolConfig, Rule


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


@dataclass(slots=True)
class Problem:
    """A measured step, its groups, and the host memory that offload may take."""

    step: MeasuredStep
    host_bytes: int
    groups: list[Group] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
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
        self.units = [unit for group in self.groups for unit in group.units]

    def rules(self, assignment: Assignment) -> dict[str, Rule]:
        """The rules of all units, by the choice of each."""
        found: dict[str, Rule] = {}
        for unit, choice in zip(self.units, assignment):
            found.update(rules_of(unit, choice, self.least_bytes))
        return found


class CandidatePool:
    """All that was predicted."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.predictor = problem.predictor or Predictor(problem.step)
        self.candidates: list[Candidate] = []
        self._known: list[tuple[Assignment, Prediction]] = []
        self._by_key: dict[frozenset[str], Prediction | None] = {}
        self._fastest: list[tuple[int, float]] = []

    @property
    def count(self) -> int:
        """Predictions so far."""
        return len(self._by_key)

    @property
    def worth(self) -> int:
        """How many predictions searches are worth."""
        step, problem = self.predictor.step, self.problem
        alike = max((len(group.units) for group in problem.groups), default=0)
        return predictions_for(step.count + len(step.profile.tensors), len(problem.units), alike)

    def known(self) -> Sequence[tuple[Assignment, Prediction]]:
        return self._known

    def predict(self, assignment: Assignment) -> Prediction | None:
        """What is predicted; None if the host has too little memory for it."""
        unbeaten = list(self._fastest)
        found = self.predict_alone(assignment)
        if found is not None and found.staying and self._fastest != unbeaten:
            # Rules that move nothing may not be worth their hooks.
            self.predict_alone(self._without(assignment, found.staying))
        return found

    def predict_alone(self, assignment: Assignment) -> Prediction | None:
        """The same, without a second prediction of what has no rules that move nothing."""
        return self._predict_rules(self.problem.rules(assignment), assignment)

    def predict_rules(self, rules: dict[str, Rule]) -> Prediction | None:
        """The same for rules that may name what no unit has a choice for: no search begins from them."""
        return self._predict_rules(rules, None)

    def _predict_rules(self, rules: dict[str, Rule], assignment: Assignment | None) -> Prediction | None:
        key = frozenset(f"{name} {rule.home} {rule.fraction}" for name, rule in rules.items())
        if key in self._by_key:
            return self._by_key[key]
        found = self.predictor.predict(RuleTable(rules, PoolConfig()))
        fits_host = found.host_bytes <= self.problem.host_bytes
        self._by_key[key] = found if fits_host else None
        if fits_host:
            self.candidates.append(Candidate(rules, found))
            if assignment is not None:
                self._known.append((assignment, found))
            self._note(found)
        return self._by_key[key]

    def _note(self, found: Prediction) -> None:
        """Keep the peaks and seconds that no other beats."""
        own = found.peak_bytes, found.mean_seconds
        if not any(peak <= own[0] and seconds <= own[1] for peak, seconds in self._fastest):
            left = [(peak, seconds) for peak, seconds in self._fastest if peak < own[0] or seconds < own[1]]
            self._fastest = [*left, own]

    def _without(self, assignment: Assignment, regions: frozenset[str]) -> Assignment:
        names = [
            {unit.inner(region) for region in unit.regions if region.name in regions}
            for unit in self.problem.units
        ]
        return tuple(
            tuple(item for item in choice if item[0] not in own) for choice, own in zip(assignment, names)
        )
