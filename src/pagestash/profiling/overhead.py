"""What a keeper costs the host, measured on the model's own step: one that is bound by launches pays for it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pagestash.policy import Policy, Rule
from pagestash.profiling.records import Region
from pagestash.profiling.steps import RepeatedStep
from pagestash.profiling.timeline import StepClock, Timeline
from pagestash.saved.keeper import Keeper

WARM, ROUNDS = 3, 6
LEAST_BYTES = 4096
"""A tensor that is moved to see what that costs."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of the host."""

    pack: float = 0.0
    """A saved tensor that stays, in forward."""
    unpack: float = 0.0
    """The same in backward."""
    record: float = 0.0
    """A recomputed region in forward."""
    replay: float = 0.0
    """The same in backward, beside the region's own forward."""
    put: float = 0.0
    """A group that is moved, in forward."""
    get: float = 0.0
    """The same in backward."""


def measure_overhead(step: RepeatedStep, regions: Sequence[Region], tensors: int) -> Overhead | None:
    """Run the step, which saves so many tensors, without a keeper and under keepers that do little.

    None without a GPU, and for a model that a keeper refuses.
    """
    pattern, tried = _small_regions(step, regions)
    if step.device.type != "cuda" or not tried:
        return None
    try:
        alone = _launched(step, None)
        kept = _launched(step, Rule(tried[0].name, "keep"))
        recomputed = _launched(step, Rule(pattern, "recompute", min_bytes=LEAST_BYTES))
        moved = _launched(step, Rule(pattern, "offload", min_bytes=LEAST_BYTES, prefetch_bytes=0))
    except (RuntimeError, ValueError):
        return None

    own = alone[0] * sum(r.total_forward_seconds for r in tried) / _forward_seconds(regions)
    pack, unpack = _each(kept, alone, max(1, tensors))
    record, replay = _each(recomputed, kept, len(tried))
    put, get = _each(moved, kept, len(tried))
    return Overhead(pack, unpack, record, max(0.0, replay - own / len(tried)), put, get)


def _each(seconds: tuple[float, float], others: tuple[float, float], count: int) -> tuple[float, float]:
    """What forward and backward take more than others, for one of so many."""
    forward, backward = (max(0.0, (one - other) / count) for one, other in zip(seconds, others))
    return forward, backward


def _small_regions(step: RepeatedStep, regions: Sequence[Region]) -> tuple[str, list[Region]]:
    """The pattern of alike modules, many of them, that save something and take the least time."""
    modules = dict(step.model.named_modules())
    alike: dict[str, list[Region]] = {}
    for region in regions:
        inner = any(other.name.startswith(region.name + ".") for other in regions)
        if region.name in modules and region.calls == 1 and region.bytes >= LEAST_BYTES and not inner:
            alike.setdefault(re.sub(r"\b\d+\b", "*", region.name), []).append(region)
    if not alike:
        return "", []
    most = max(map(len, alike.values()))

    def seconds(pattern: str) -> float:
        return sum(region.total_forward_seconds for region in alike[pattern])

    pattern = min((name for name, found in alike.items() if len(found) > most / 2), key=seconds)
    return pattern, alike[pattern]


def _forward_seconds(regions: Sequence[Region]) -> float:
    return sum(region.forward_seconds for region in regions) or 1.0


def _launched(step: RepeatedStep, rule: Rule | None) -> tuple[float, float]:
    """The host's seconds of forward and backward, under a keeper with one rule or without.

    The least of several steps: what disturbs the host makes it slower, never faster.
    """
    keeper = None if rule is None else Keeper(Policy([rule])).attach(step.model)
    times = []
    try:
        for _ in range(WARM + ROUNDS):
            clock = StepClock()
            step.run(Timeline(clock), around=None if keeper is None else keeper.step())
            times.append(clock.launched)
    finally:
        if keeper is not None:
            keeper.detach()
    forward, backward = zip(*times[WARM:])
    return min(forward), min(backward)
