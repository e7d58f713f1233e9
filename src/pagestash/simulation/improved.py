"""The homes of layouts that a search found, planned further by the planner's own search (`planning/improve.py`).

A layer is a unit, and the alike layers of a rank are a group. A block of neighbouring layers takes one home more,
or one less, or the homes of the block beside it; or a whole group takes a home, or loses it. The byte formulas and
a replay say what that brings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pagestash.planning.improve import Assignment, Search
from pagestash.planning.layers import Choice, Group, Unit
from pagestash.planning.prediction import Cost
from pagestash.planning.result import number_ranges
from pagestash.policy import Policy, Rule
from pagestash.simulation.build import Known, step_costs
from pagestash.simulation.choices import BOTH, Allowed, ChosenHomes, choices_of, layer_kinds, layers_of_rank
from pagestash.simulation.choices import Choice as LayerHomes
from pagestash.simulation.costs import LayerCosts, RankCosts
from pagestash.simulation.homes import PolicyHomes
from pagestash.simulation.run import Run
from pagestash.simulation.search import Found, describe
from pagestash.simulation.search import Search as LayoutSearch
from pagestash.simulation.steady import shortened, step_seconds

PREDICTIONS = 40
"""Changes of a layout's homes that are replayed, at most."""


def improve(
    found: LayoutSearch,
    allowed: Sequence[Allowed] = BOTH,
    progress: Callable[[str], None] = lambda line: None,
) -> LayoutSearch:
    """The best layout and its runners-up, each with better homes: another one may be the best then."""
    fitting: list[Found] = []
    for before in (found.best, *(item for item in found.others if item.played is not None)):
        if fitting and before.bound >= fitting[0].seconds:
            fitting.append(before)  # no homes make it the best
            continue
        after = improved(before, allowed)
        progress(f"homes of {describe(before.run)}: {before.seconds:.2f} s, then {after.seconds:.2f} s")
        fitting = sorted([*fitting, after], key=lambda item: item.seconds)
    lacking = (item for item in found.others if item.played is None)
    best, *others = sorted(fitting, key=lambda item: item.seconds)
    return replace(found, best=best, others=(*others, *lacking))


def improved(found: Found, allowed: Sequence[Allowed] = BOTH, predictions: int = PREDICTIONS) -> Found:
    """The layout with the fastest homes that are found then and fit: never slower than before."""
    homes = found.run.homes
    if found.played is None or not isinstance(homes, ChosenHomes):  # it does not fit, or needs no homes
        return found
    pool = _Pool(found.run, allowed)
    begun = pool.assignment(homes)
    for assignment in (begun, pool.assignment(ChosenHomes({}))):
        pool.predict(assignment)
    search = Search(pool.groups, pool, byte_seconds=pool.byte_seconds)
    room = found.run.cluster.device.memory
    search.run([room], predictions)
    fitting = [(assignment, own) for assignment, own in pool.known() if own.peak_bytes <= room]
    best, own = min(fitting, key=lambda item: item[1].seconds)
    if own.seconds >= found.seconds:
        return found
    chosen = pool.homes(best)
    costs = step_costs(replace(pool.run, homes=chosen))
    played, seconds = step_seconds(found.run, costs)
    planned = replace(
        found.planned, run=replace(found.run, homes=chosen), costs=costs, policies=tuple(pool.policies(best))
    )
    return replace(found, planned=planned, played=played, seconds=max(seconds, found.bound))


@dataclass(frozen=True, slots=True)
class _Predicted:
    seconds: float
    peak_bytes: int
    """Of the fullest device."""
    is_waiting: bool = False
    """A cluster's link is shared: how long a rank waits for it is not told apart."""


class _Pool:
    """What was predicted for one layout."""

    def __init__(self, run: Run, allowed: Sequence[Allowed]) -> None:
        self._whole, self.run = run, shortened(run)
        self._known = Known(self.run)
        plain = step_costs(replace(self.run, homes=PolicyHomes(Policy())), self._known)
        self.byte_seconds = 1 / plain.host.out + 1 / plain.host.back
        self._steps = list(dict.fromkeys(item for choice in choices_of(run, allowed) for item in choice))
        self._kinds: dict[LayerHomes, Mapping[str, LayerCosts]] = {}
        self.groups: list[Group] = []
        self._layers: list[list[int]] = []  # of each group, numbers
        self._ranks: list[int] = []  # of each group
        for rank in plain.ranks:
            self._add(rank)
        self._found: dict[Assignment, _Predicted | None] = {}

    @property
    def count(self) -> int:
        """Predictions so far."""
        return len(self._found)

    def known(self) -> list[tuple[Assignment, _Predicted]]:
        return [(assignment, own) for assignment, own in self._found.items() if own is not None]

    def predict(self, assignment: Assignment) -> _Predicted | None:
        """What is predicted; None if the host has too little memory for it."""
        if assignment not in self._found:
            self._found[assignment] = self._predict(assignment)
        return self._found[assignment]

    def _predict(self, assignment: Assignment) -> _Predicted | None:
        costs = step_costs(replace(self.run, homes=self.homes(assignment)), self._known)
        if max(rank.host_bytes for rank in costs.ranks) > self.run.cluster.host_bytes_a_device:
            return None
        _, seconds = step_seconds(self._whole, costs)
        return _Predicted(seconds, max(rank.device_bytes for rank in costs.ranks))

    # --- layers and their homes ---

    def _add(self, rank: RankCosts) -> None:
        """The layers of a rank: those without experts, and those with."""
        dense = self.run.config.dense_layers
        held = max(sum(now.values()) for now in rank.plan.held()) / len(rank.stages)  # of each layer, at once
        for kind, has in (("dense", lambda number: number < dense), ("moe", lambda number: number >= dense)):
            numbers = [number for number in sorted(layers_of_rank(rank)) if has(number)]
            if numbers:
                steps: list[Choice] = [((*item, 1.0),) for item in self._steps if _is_in(item[0], kind)]
                units = [Unit(f"layers.{number}") for number in numbers]
                self.groups.append(Group(units, steps=steps, cost=self._cost(kind, held)))
                self._layers.append(numbers)
                self._ranks.append(rank.rank)

    def _cost(self, kind: str, held: float) -> Callable[[Choice], Cost]:
        """What homes of a layer should bring: it says which changes are tried first."""

        def cost(choice: Choice) -> Cost:
            homes: LayerHomes = tuple(_without_part(choice))
            if homes not in self._kinds:
                self._kinds[homes] = layer_kinds(self.run, homes)
            own = self._kinds[homes][kind]
            again = self._whole.microbatches * own.recompute.at()
            return Cost(int(held * own.kept_bytes.at()), int(held * own.moved_bytes.at()), again, 0)

        return cost

    def assignment(self, homes: ChosenHomes) -> Assignment:
        """The homes of each layer, in the order of groups."""
        return tuple(
            tuple(
                sorted((*item, 1.0) for item in homes.choice(unit.name) if (((*item, 1.0),)) in group.steps)
            )
            for group in self.groups
            for unit in group.units
        )

    def homes(self, assignment: Assignment) -> ChosenHomes:
        units = (unit.name for group in self.groups for unit in group.units)
        return ChosenHomes({name: tuple(_without_part(choice)) for name, choice in zip(units, assignment)})

    def policies(self, assignment: Assignment) -> Iterator[Policy]:
        """A policy for each rank: a rule for each region and home."""
        choices = iter(assignment)
        numbers: dict[int, dict[tuple[str, Allowed], list[int]]] = {}
        for rank, layers in zip(self._ranks, self._layers):
            own = numbers.setdefault(rank, {})
            for number in layers:
                for item in _without_part(next(choices)):
                    own.setdefault(item, []).append(number)
        for rank in range(self.run.layout.pp):
            yield Policy(
                [
                    Rule(f"layers.{{{number_ranges(sorted(layers))}}}{region and '.'}{region}", home)
                    for (region, home), layers in numbers.get(rank, {}).items()
                ]
            )


def _is_in(region: str, kind: str) -> bool:
    """Whether a layer of this kind has the region."""
    return not region.startswith("moe." if kind == "dense" else "mlp.")


def _without_part(choice: Choice) -> Iterator[tuple[str, Allowed]]:
    """Regions and homes, without the part that leaves, which is all."""
    for region, home, _ in choice:
        if home == "recompute" or home == "offload":
            yield region, home
