"""The candidates of a plan: for each group of alike layers, how many of them take which choice.

Counts are proposed by a linear program (`program.py`), once for each of some memory targets between the smallest
and the unplanned peak, and for each of `RATES` of the link. Every candidate is predicted (`predict.py`), and a plan
is chosen by what is predicted. The candidates do not depend on the budget, so more memory never makes a plan
slower. Beside the counts, candidates are pairs of choices (`pairs.py`), what a search finds from there
(`improve.py`), and each choice for all layers. If there are at most `EXHAUSTIVE` ways to give each layer a choice,
all are candidates.

Which layers: the earliest take the choice that moves most, because their copies have the longest way back; then
those that recompute most; the last ones keep, because their backward comes first, where memory is at its most.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from operator import attrgetter

from pagestash.planning.alternatives import by_hand
from pagestash.planning.improve import LEVELS, Assignment, Search, by_seconds, predictions_for
from pagestash.planning.lanes import SLOW_STEPS
from pagestash.planning.layers import Choice, Group, Unit, find_groups, least_bytes_of, rules_of, with_mixes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.pairs import likely_pairs
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.program import Counts, Program, uniform
from pagestash.policy import HOMES, PoolConfig, Rule

GRID, COARSE_GRID = 12, 6
"""Memory levels that the program is solved for; fewer in a large step, where a prediction takes long. All of the
fewer are among the others."""
RATES = (1.0, 0.4, 0.0)
"""Parts of the link's rates that the program counts on. Real copies hide less well than their sum says: a window
holds few groups, and the last layers' come back at once. With 0 nothing is moved."""
MIXED_RATES = (1.0, 0.7, 0.4)
"""The same of choices that offload some regions beside recomputed ones."""
EXHAUSTIVE = 900
FEW = 180
"""Predictions: where searches take fewer, fewer levels, pairs of choices, and choices for all layers are
tried, too."""


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


class _Pool:
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
        step = self.predictor.step
        return predictions_for(step.count + len(step.profile.tensors), len(self.problem.units))

    def known(self) -> Sequence[tuple[Assignment, Prediction]]:
        return self._known

    def predict(self, assignment: Assignment) -> Prediction | None:
        """What is predicted; None if the host has too little memory for it."""
        unbeaten = list(self._fastest)
        found = self._predict(assignment)
        if found is not None and found.staying and self._fastest != unbeaten:
            # Rules that move nothing may not be worth their hooks.
            self._predict(self._without(assignment, found.staying))
        return found

    def _predict(self, assignment: Assignment) -> Prediction | None:
        rules = self.problem.rules(assignment)
        key = frozenset(f"{name} {rule.home} {rule.fraction}" for name, rule in rules.items())
        if key in self._by_key:
            return self._by_key[key]
        found = self.predictor.predict(RuleTable(rules, PoolConfig()))
        fits_host = found.host_bytes <= self.problem.host_bytes
        self._by_key[key] = found if fits_host else None
        if fits_host:
            self.candidates.append(Candidate(rules, found))
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


def candidates(problem: Problem) -> list[Candidate]:
    """All candidates, the fastest first; one of them keeps everything."""
    pool = _Pool(problem)
    for assignment in _by_hand(problem):  # the first one keeps
        pool.predict(assignment)
    if prod(len(group.choices) ** len(group.units) for group in problem.groups) <= EXHAUSTIVE:
        for assignment in product(*(group.choices for group in problem.groups for _ in group.units)):
            pool.predict(assignment)
    else:
        few = pool.worth < FEW
        each, levels = (1, COARSE_GRID) if few else (4, GRID)
        counted = _by_counts(problem, levels, mixes=problem.host_bytes > 0 and not few)
        for assignment in (*counted, *_mixed(problem, each)):
            pool.predict(assignment)
        _improve(problem, pool)
        for assignment in _alike(problem, moving=not few):
            pool.predict(assignment)
    return sorted(pool.candidates, key=lambda item: (item.predicted.mean_seconds, item.predicted.peak_bytes))


def _by_hand(problem: Problem) -> Iterator[Assignment]:
    """What one would write without a plan: no plan is slower than that."""
    for rules in by_hand(problem.step.profile, problem.host_bytes).values():
        yield tuple(
            tuple(
                sorted(
                    (unit.inner(region), rules[region.name].home, 1.0)
                    for region in unit.regions
                    if region.name in rules
                )
            )
            for unit in problem.units
        )


def _improve(problem: Problem, pool: _Pool) -> None:
    link = problem.step.profile.link
    unplanned = pool.known()[0][1]
    saved = sum(unplanned.at_peak()[home] for home in HOMES)
    levels = [unplanned.peak_bytes - round((1 - part) * saved) for part in LEVELS]
    # A rank of a pipeline is planned many times, once for each way to place layers.
    share = 1 if pool.predictor.step.count == problem.step.count else 4
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


def _by_counts(problem: Problem, levels: int, *, mixes: bool) -> Iterator[Assignment]:
    """What a program proposes; with `mixes` also of choices that offload some regions beside recomputed ones."""
    groups = problem.groups
    smallest = [min(range(len(g.costs)), key=lambda at: g.costs[at].kept_bytes) for g in groups]
    # Recomputing may be smaller than it looks by what is kept: it moves nothing, and has no window.
    still = [
        min(range(len(g.costs)), key=lambda at: (g.costs[at].moved_bytes > 0, g.costs[at].kept_bytes))
        for g in groups
    ]
    for chosen in ([0] * len(groups), smallest, still):
        yield _assigned(groups, uniform(groups, chosen))
    own = problem.predictor
    if own is None or own.step is not problem.step:
        own = Predictor(problem.step)
    plain = own.predict(RuleTable({}, PoolConfig()))
    yield from _solved(problem, groups, plain, levels, RATES)
    if mixes:
        yield from _solved(problem, [with_mixes(group) for group in groups], plain, levels, MIXED_RATES)


def _solved(
    problem: Problem, groups: Sequence[Group], plain: Prediction, levels: int, rates: Sequence[float]
) -> Iterator[Assignment]:
    """The program's counts, for so many memory levels and these parts of the link's rates."""
    program = Program(problem.step, groups, problem.host_bytes, problem.others, plain)
    least = program.least()
    yield _assigned(groups, least)
    low, high = program.level(least), program.level(uniform(groups, [0] * len(groups)))
    for number, rate in product(range(levels), rates):
        counts = program.solve(low + (high - low) * number / levels, rate)
        if counts is not None:
            yield _assigned(groups, counts)
    problem.exact &= program.exact


def _assigned(groups: Sequence[Group], counts: Counts) -> Assignment:
    """The choice of each unit, by counts: who moves most comes first."""
    chosen: list[Choice] = []
    for group, own in zip(groups, counts):
        order = sorted(
            range(len(own)),
            key=lambda at: (-group.costs[at].moved_bytes, -group.costs[at].recomputed_bytes, at),
        )
        chosen += [group.choices[at] for at in order for _ in range(own[at])]
    return tuple(chosen)
