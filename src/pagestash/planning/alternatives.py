"""Policies that one would write without a plan, to compare it with."""

from collections.abc import Iterable

from pagestash.planning.layers import find_units, least_bytes_of, rule
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.policy import HomeName, PoolConfig
from pagestash.profiling.records import Region


def alternatives(predictor: Predictor, host_bytes: int) -> dict[str, Prediction]:
    """The step under each of them by name, without those that the profile or the host rules out."""
    profile = predictor.one.profile
    units = find_units(profile.regions)
    layers = [unit for unit in units if unit.name[-1].isdigit()]
    recomputed = [
        region
        for unit in layers
        for region in _outermost(region for region in unit.regions if "recompute" in region.homes)
    ]
    offloaded = [region for unit in units for region in _outermost(unit.regions)]
    chosen: dict[str, tuple[HomeName, list[Region]]] = {
        "keep all": ("keep", []),
        "recompute layers": ("recompute", recomputed),
        "offload all": ("offload", offloaded if host_bytes else []),
    }
    least = least_bytes_of(profile)
    found: dict[str, Prediction] = {}
    for name, (home, regions) in chosen.items():
        rules = {region.name: rule(region.name, home, least) for region in regions}
        if rules or home == "keep":
            predicted = predictor.predict(RuleTable(rules, PoolConfig()))
            if predicted.host_bytes <= host_bytes:
                found[name] = predicted
    return found


def _outermost(regions: Iterable[Region]) -> list[Region]:
    """Those that are inside none of the others."""
    named = {region.name: region for region in regions}
    return [region for name, region in named.items() if not named.keys() & set(region.path) - {name}]
