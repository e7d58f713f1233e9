"""Policies that one would write without a plan, to compare it with."""

from collections.abc import Iterable

from pagestash.planning.choices import find_units, least_bytes_of, rule
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.policy import HomeName, PoolConfig, Rule
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import Region


def by_hand(profile: ProfiledStep, host_bytes: int) -> dict[str, dict[str, Rule]]:
    """Their rules, by name and region. Without host memory nothing is offloaded."""
    units, least = find_units(profile.regions), least_bytes_of(profile)
    layers = [unit for unit in units if unit.name[-1].isdigit()]
    recomputed = [
        region
        for unit in layers
        for region in _outermost(region for region in unit.regions if "recompute" in region.homes)
    ]
    offloaded = [region for unit in units for region in _outermost(unit.regions)]
    chosen: dict[str, tuple[HomeName, list[Region]]] = {
        "recompute layers": ("recompute", recomputed),
        "offload all": ("offload", offloaded if host_bytes else []),
    }
    found: dict[str, dict[str, Rule]] = {"keep all": {}}
    for name, (home, regions) in chosen.items():
        if regions:
            found[name] = {region.name: rule(region.name, home, least) for region in regions}
    return found


def alternatives(predictor: Predictor, host_bytes: int) -> dict[str, Prediction]:
    """The step under each of them by name, without those that the profile or the host rules out."""
    found = {
        name: predictor.predict(RuleTable(rules, PoolConfig()))
        for name, rules in by_hand(predictor.one.profile, host_bytes).items()
    }
    return {name: predicted for name, predicted in found.items() if predicted.host_bytes <= host_bytes}


def _outermost(regions: Iterable[Region]) -> list[Region]:
    """Those that are inside none of the others."""
    named = {region.name: region for region in regions}
    return [region for name, region in named.items() if not named.keys() & set(region.path) - {name}]
