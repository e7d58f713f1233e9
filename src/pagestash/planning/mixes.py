"""Mixes: some layers of a group take one choice, the others another.

For each choice it is known what it takes for all layers of a group, while other groups keep. Those whose bytes cost
least time are the group's *front*: the lower hull of time over memory, from the fastest choice to the smallest.

    time
      |  smallest
      |     o
      |       .     x             o on the front, x not
      |         o
      |             .   o
      +---------------------- memory

All groups go down their fronts together, a few layers at a time; of all steps the one whose bytes cost least time
comes first.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pagestash.planning.choices import Choice, Group
from pagestash.planning.search import BLOCKS, Assignment, blocks_of, units_of


class Point(NamedTuple):
    """A choice for a group, and what is known of it."""

    seconds: float
    peak_bytes: int
    choice: Choice


def price(one: Point, other: Point) -> float:
    """Seconds for each byte that the second point takes less."""
    return (other.seconds - one.seconds) / (one.peak_bytes - other.peak_bytes)


def front_of(points: Sequence[Point]) -> list[Point]:
    """The lower hull, from the fastest point to the smallest."""
    front = [min(points)]
    while smaller := [point for point in points if point.peak_bytes < front[-1].peak_bytes]:
        front.append(min(smaller, key=lambda point: (price(front[-1], point), point.peak_bytes)))
    return front


def mixes(
    groups: Sequence[Group], fronts: Sequence[Sequence[Point]], *, spread: bool
) -> Iterator[Assignment]:
    """All groups go down their fronts, from each one's fastest choice to its smallest.

    The earliest layers first, whose copies have the longest way back; or with `spread`, all over a large group.
    """
    units = units_of(groups)
    current = [front[0].choice for front, own in zip(fronts, units) for _ in own]
    yield tuple(current)
    steps = sorted(
        (price(*pair), number, at)
        for number, front in enumerate(fronts)
        for at, pair in enumerate(pairwise(front), 1)
    )
    for _, number, at in steps:
        for block in blocks_of(units[number]) if spread else _neighbours(units[number]):
            for unit in block:
                current[unit] = fronts[number][at].choice
            yield tuple(current)


def _neighbours(units: range) -> Iterator[range]:
    size = -(-len(units) // BLOCKS)
    return (units[at : at + size] for at in range(0, len(units), size))
