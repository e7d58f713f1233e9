"""Groups of alike layers, and what can be done with one layer of each.

A *unit* is what has one number in its name: `layers.3` with all regions inside, or a region that is in none, like
`norm`. Units are alike if they have the same regions with the same saved bytes, and times within a factor of
`LIKE_TIME`. A *choice* gives some regions of a unit a home; the others keep. All units of a group have the same
choices.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import permutations
from operator import le

from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Cost, RuleTable
from pagestash.policy import MIN_BYTES, HomeName, PoolConfig, Rule
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import Region

LIKE_TIME = 2.0
FEW_CHOICES = 18
"""So many are all considered: one may be worse by its sums, and better at the moment that counts."""
CELLS = 16
"""Of more, sums are rounded to a 16th of the largest, and those are considered that no other beats."""
FEW_STEPS = 7
"""So many homes are all combined; of more, those that take a part of a region are for the search alone."""
WORTH = 0.01
"""Part of a unit's bytes: a home that frees less of it is not considered."""

PARTS = (0.5,)
"""Fractions of a region's bytes that may be offloaded, where the region saves more than one tensor."""

Choice = tuple[tuple[str, HomeName, float], ...]
"""Regions by their names within the unit ("" is the unit itself), homes, and fractions that leave; others keep."""


@dataclass
class Unit:
    """One layer, or a region outside all layers."""

    name: str
    regions: list[Region] = field(default_factory=list)

    @property
    def is_one_layer(self) -> bool:
        """Whether it is a layer without regions inside, and runs once."""
        return len(self.regions) == 1 and layer_of(self.name) == self.name and self.regions[0].calls == 1

    def inner(self, region: Region) -> str:
        """The region's name within the unit."""
        return region.name.removeprefix(self.name).removeprefix(".")

    @cached_property
    def seconds(self) -> float:
        return sum(region.forward_seconds for region in self.regions)


@dataclass(slots=True)
class Group:
    """Alike units in the order of forward, and their choices: the first one keeps all."""

    units: list[Unit]
    choices: list[Choice] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    steps: list[Choice] = field(default_factory=list)
    """Homes that a choice is made of."""
    cost: Callable[[Choice], Cost] = lambda choice: Cost(0, 0, 0.0, 0)
    """Sums of any choice."""

    @property
    def seconds(self) -> float:
        """The mean forward of its units."""
        return sum(unit.seconds for unit in self.units) / len(self.units)


def find_groups(step: MeasuredStep, *, host: bool, least_bytes: int) -> list[Group]:
    """All groups that have a choice. Without `host` memory nothing is offloaded."""
    found: dict[object, list[Group]] = {}
    for unit in find_units(step.profile.regions):
        alike = found.setdefault(_signature(unit), [])
        fits = (group for group in alike if _like(group.seconds, unit.seconds))
        group = next(fits, None)
        if group is None:
            alike.append(Group([unit]))
        else:
            group.units.append(unit)
    for first, *others in found.values():
        _choose(step, first, host=host, least_bytes=least_bytes)
        for group in others:  # they differ in time alone
            ratio = group.seconds / first.seconds if first.seconds else 1.0
            group.choices, group.steps = first.choices, first.steps
            group.cost = first.cost
            group.costs = [_slower(cost, ratio) for cost in first.costs]
    return [group for alike in found.values() for group in alike if len(group.choices) > 1]


def _slower(cost: Cost, ratio: float) -> Cost:
    """The same on layers whose forward takes so many times as long on the device; the host's time stays."""
    more = (ratio - 1) * cost.device_seconds
    return cost._replace(seconds=cost.seconds + more, device_seconds=cost.device_seconds + more)


def least_bytes_of(profile: ProfiledStep) -> int:
    """Smaller tensors are not worth a copy: 1 MiB, and less only in a step that saves less than 1 GiB."""
    return max(1, min(MIN_BYTES["offload"], profile.total_bytes >> 10))


def rules_of(unit: Unit, choice: Choice, least_bytes: int) -> dict[str, Rule]:
    """The choice's rules by region."""
    found: dict[str, Rule] = {}
    for inner, home, part in choice:
        name = f"{unit.name}.{inner}" if inner else unit.name
        found[name] = rule(name, home, least_bytes, part)
    return found


@lru_cache(maxsize=1 << 16)
def rule(match: str, home: HomeName, least_bytes: int, fraction: float = 1.0) -> Rule:
    """A rule of a plan."""
    return Rule(match, home, min_bytes=None if home == "recompute" else least_bytes, fraction=fraction)


def layer_of(name: str) -> str | None:
    """The layer that a region is in: its name up to the first number.

    >>> layer_of("model.layers.3.mlp.experts.0")
    'model.layers.3'
    """
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return None if numbered is None else numbered[0]


def find_units(regions: Iterable[Region]) -> list[Unit]:
    """All units, in the order of forward."""
    units: dict[str, Unit] = {}
    for region in regions:
        layer = layer_of(region.name)
        if layer:
            units.setdefault(layer, Unit(layer)).regions.append(region)
        elif region.name and region.bytes:
            units[region.name] = Unit(region.name, [region])
    # What is around layers keeps: a home for it would be one for all of them together.
    layers = [name for name in units if re.search(r"\d$", name)]
    return [unit for name, unit in units.items() if not any(_around(name, layer) for layer in layers)]


def _signature(unit: Unit) -> object:
    return re.sub(r"\d+", "*", unit.name), tuple(
        (unit.inner(region), region.bytes, region.within == region.name, tuple(sorted(region.homes)))
        for region in unit.regions
    )


def _like(one: float, other: float) -> bool:
    return max(one, other) <= LIKE_TIME * min(one, other)


def _choose(step: MeasuredStep, group: Group, *, host: bool, least_bytes: int) -> None:
    """Find the group's choices: combinations of single homes, without those that another beats in all respects."""
    unit = group.units[len(group.units) // 2]
    names = {region.name for region in unit.regions}
    # A layer that is one region, as in `nn.Sequential`, may save nothing but its input. Recomputing it then frees
    # its output, which the next layer saves. (Not if it saves that, too: offloading it would seem to free nothing.)
    made = set(unit.regions[0].outputs) if unit.is_one_layer else set[int]()
    made -= {tensor.storage for tensor in step.profile.tensors if not names.isdisjoint(tensor.path)}
    # (Also tensors of a module that has its name elsewhere, and runs in here.)
    part = step.part(
        [
            tensor
            for tensor in step.profile.tensors
            if tensor.storage in made or not names.isdisjoint(tensor.path)
        ],
        unit.regions,
    )
    own, predictor, pool = part.profile, Predictor(part), PoolConfig()

    @cache
    def cost(choice: Choice) -> Cost:
        return predictor.cost(RuleTable(rules_of(unit, choice, least_bytes), pool))

    known: dict[Choice, Cost] = {(): cost(())}
    whole = known[()].kept_bytes
    steps = [item for item in _steps(unit, own, host=host) if cost(item).kept_bytes <= (1 - WORTH) * whole]
    front: list[Choice] = [()]
    for item in steps if len(steps) <= FEW_STEPS else [item for item in steps if item[0][2] == 1.0]:
        for before in front:
            joined = _join(before, item)
            if joined is not None and joined not in known:
                known[joined] = cost(joined)
        front = _best(known)
    group.choices, group.costs = front, [known[choice] for choice in front]
    group.steps, group.cost = steps, cost


def _steps(unit: Unit, own: ProfiledStep, *, host: bool) -> list[Choice]:
    """Single homes, and offload for regions that share a storage: it leaves only with all of them."""
    found: list[Choice] = []
    sharing: dict[int, set[str]] = {}
    own_storages: dict[str, set[int]] = {}
    for tensor in own.tensors:
        if tensor.kind == "activation":
            sharing.setdefault(tensor.storage, set()).add(tensor.region)
            if tensor.counted > WORTH * own.total_bytes:
                own_storages.setdefault(tensor.region, set()).add(tensor.storage)
    inner = {region.name: unit.inner(region) for region in unit.regions}
    for region in unit.regions:
        if "recompute" in region.homes:
            found.append(((inner[region.name], "recompute", 1.0),))
            makers = _makers(region, unit.regions)
            if makers:
                found.append(
                    tuple(sorted((inner[name], "recompute", 1.0) for name in (region.name, *makers)))
                )
        if region.homes["stash"].saved_bytes > WORTH * region.bytes:
            found.append(((inner[region.name], "stash", 1.0),))
    if host:
        savers = {frozenset(names & inner.keys()) for names in sharing.values()} - {frozenset()}
        savers |= {frozenset((name,)) for names in savers for name in names}
        joined = frozenset().union(*(names for names in savers if len(names) > 1))
        for names in sorted({*savers, joined} - {frozenset()}, key=lambda names: (len(names), sorted(names))):
            found.append(tuple((inner[name], "offload", 1.0) for name in sorted(names)))
        for name in sorted(inner.keys() & own_storages.keys()):
            if len(own_storages[name]) > 1:
                found += [((inner[name], "offload", part),) for part in PARTS]
    return found


def _makers(region: Region, regions: Sequence[Region]) -> list[str]:
    """The regions that make what would wait for a replay of this one: recomputing all of them gains something."""
    wanted, found = {storage for storage, _ in region.unsaved_inputs}, list[str]()
    for other in reversed(regions):  # the last one in forward first: it may need what others make
        made = {storage for storage, _ in other.unsaved_outputs} & wanted
        apart = not any(
            _around(*pair) for name in (region.name, *found) for pair in permutations((name, other.name))
        )
        if made and apart and "recompute" in other.homes:
            found.append(other.name)
            wanted = wanted - made | {storage for storage, _ in other.unsaved_inputs}
    return found


def _join(before: Choice, item: Choice) -> Choice | None:
    """Both together; None where they contradict each other."""
    if any(_contradict(one, other) for one in before for other in item):
        return None
    return tuple(sorted({*before, *item}))


@lru_cache(maxsize=2**14)  # a search asks for the same few again and again
def toggled(choice: Choice, item: Choice) -> Choice:
    """The choice without these homes if it has them all, else with them, and without what contradicts them."""
    if set(item) <= set(choice):
        return tuple(one for one in choice if one not in item)
    left = [one for one in choice if not any(_contradict(one, other) for other in item)]
    return tuple(sorted({*left, *item}))


def _contradict(one: tuple[str, HomeName, float], other: tuple[str, HomeName, float]) -> bool:
    """Whether they name the same region, or one is inside a region that the other recomputes."""
    (name, home, _), (another, new, _) = one, other
    if name == another:
        return one != other
    return (home == "recompute" and _around(name, another)) or (new == "recompute" and _around(another, name))


def _around(outer: str, inner: str) -> bool:
    return outer != inner and (not outer or inner.startswith(outer + "."))


def _best(known: dict[Choice, Cost]) -> list[Choice]:
    """A few choices, or of many those that no other beats in all respects; the one that keeps all comes first."""
    front = list(known) if len(known) <= FEW_CHOICES else _unbeaten(known)
    front.sort(key=lambda choice: (-known[choice].kept_bytes, -known[choice].seconds, len(choice), choice))
    return [(), *(choice for choice in front if choice)]


def _unbeaten(known: dict[Choice, Cost]) -> list[Choice]:
    """Those that no other beats by its bytes on the device and over the link, and its time on device and host.

    To a `CELLS`th of the most: what is a little slower or larger by its sums may be what fits best.
    """
    sums = {
        choice: (
            cost.kept_bytes,
            cost.moved_bytes,
            cost.device_seconds,
            cost.seconds - cost.device_seconds + cost.launch_seconds,
        )
        for choice, cost in known.items()
    }
    most = [max(own) or 1 for own in zip(*sums.values())]
    cells: dict[tuple[int, ...], Choice] = {}
    for choice in sorted(
        known, key=lambda choice: (known[choice].seconds, known[choice], len(choice), choice)
    ):
        cell = tuple(round(CELLS * own / whole) for own, whole in zip(sums[choice], most))
        cells.setdefault(cell, choice)
    front: list[tuple[int, ...]] = []
    for cell in sorted(cells):  # none beats one before it
        if not any(all(map(le, other, cell)) for other in front):
            front.append(cell)
    return [cells[cell] for cell in front]
