"""Pairs of choices that are likely to be fast: the earliest layers take one, the others another."""

from collections.abc import Sequence
from itertools import product

from pagestash.planning.layers import Choice
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.prediction import Cost

PARTS, RANGES = 4, 12
"""Of mixes: quarters of the layers differ; of each twelfth of the range of sizes, some are tried."""
HIDDEN = 0.5
"""Part of forward behind which copies out may hide, roughly; only to say which mixes are tried."""

Pair = tuple[float, float, Choice, Choice, int]
"""Kept bytes, seconds, the choice of the first layers, that of the others, and how many are first."""


def likely_pairs(
    mixes: dict[Choice, Cost], layers: int, step: MeasuredStep, each: int
) -> list[tuple[Choice, Choice, int]]:
    """The choice of the first layers, that of the others, and how many are first; `each` of a range of sizes."""
    found = _pairs(mixes, layers, step)
    return [] if not found else _fastest(found, each)


def _pairs(mixes: dict[Choice, Cost], layers: int, step: MeasuredStep) -> list[Pair]:
    """All pairs, with what they take roughly: copies hide behind a part of forward."""
    link = step.profile.link
    hidden = HIDDEN * link.out * sum(step.seconds[: step.turn])
    found: list[Pair] = []
    for (first, one), (second, other) in product(mixes.items(), repeat=2):
        if not one.moved_bytes or other.moved_bytes > one.moved_bytes:
            continue
        parts = {layers * part // PARTS for part in range(1, PARTS)} - {0}
        for count in [layers] if first == second else sorted(parts):
            kept, moved, spent = (
                count * a + (layers - count) * b
                for a, b in (
                    (one.kept_bytes, other.kept_bytes),
                    (one.moved_bytes, other.moved_bytes),
                    (one.seconds, other.seconds),
                )
            )
            spent += max(0.0, moved - hidden) * (1 / link.out + 1 / link.back)
            found.append((kept, spent, first, second, count))
    return found


def _fastest(found: Sequence[Pair], each: int) -> list[tuple[Choice, Choice, int]]:
    """Of each of so many ranges of kept bytes, the ones that take the least time."""
    low, high = min(item[0] for item in found), max(item[0] for item in found)
    width = (high - low) / RANGES or 1.0
    ranges: dict[int, list[Pair]] = {}
    for item in found:
        ranges.setdefault(min(RANGES - 1, int((item[0] - low) / width)), []).append(item)
    best = (sorted(own, key=lambda item: (item[1], item[0]))[:each] for own in ranges.values())
    return [item[2:] for own in best for item in own]
