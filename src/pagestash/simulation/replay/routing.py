"""Rows per (layer, microbatch, rank) when routing is skewed.

Rows of a layer are drawn for each rank of an expert-parallel group from a distribution (`rows/`: stated,
or counted in a run), and scaled so that their mean over the group is 1: rows move between ranks, none are lost. A
rank that is hot for one microbatch is so for the next ones, too, because experts have their subjects and
neighbouring data have the same: with z normal and F the distribution,

    rows = F⁻¹(Φ(√c · z[layer, rank] + √(1 − c) · z[layer, rank, microbatch]))        c = CORRELATION

Time goes by the hottest rank of each layer. Memory is that of one rank: of a pipeline rank's group the one that
receives most in the whole step.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import sqrt
from statistics import NormalDist

from pagestash.row_counts.distribution import RowDistribution
from pagestash.simulation.costs.costs import StepCosts
from pagestash.simulation.replay.programs import Balanced, Routing

CORRELATION = 0.8
"""Between microbatches of one step: an assumption, no measurement."""
PERIOD = 32
"""Microbatches after which the draws repeat: enough of them for a mean, and few enough for any step."""


class Drawn:
    """Drawn rows. `layers` are the layers of each pipeline rank, numbered through the model."""

    def __init__(
        self, rows: RowDistribution, *, ranks: int, layers: Sequence[Sequence[int]], seed: int = 0
    ) -> None:
        self._hottest: dict[int, list[float]] = {}
        self._held: dict[int, list[float]] = {}
        draw = _Draws(rows, seed)
        for own in layers:
            drawn = {layer: draw.layer(ranks) for layer in own}
            totals = [sum(row[rank] for table in drawn.values() for row in table) for rank in range(ranks)]
            fullest = max(range(ranks), key=totals.__getitem__)
            for layer, table in drawn.items():
                self._hottest[layer] = [max(row) for row in table]
                self._held[layer] = [row[fullest] for row in table]

    def hottest(self, layer: int, microbatch: int) -> float:
        return self._hottest[layer][microbatch % PERIOD]

    def held(self, layer: int, microbatch: int) -> float:
        return self._held[layer][microbatch % PERIOD]


class _Draws:
    def __init__(self, rows: RowDistribution, seed: int) -> None:
        self._values, self._cumulative = rows.values, list(accumulate(rows.weights))
        self._random = random.Random(seed)
        self._part = NormalDist().cdf

    def layer(self, ranks: int) -> list[list[float]]:
        """Rows of each rank, microbatch by microbatch."""
        gauss = self._random.gauss
        fixed = [sqrt(CORRELATION) * gauss(0, 1) for _ in range(ranks)]
        found = []
        for _ in range(PERIOD):
            row = [self._value(base + sqrt(1 - CORRELATION) * gauss(0, 1)) for base in fixed]
            mean = sum(row) / ranks
            found.append([value / mean for value in row] if mean else [1.0] * ranks)
        return found

    def _value(self, z: float) -> float:
        at = bisect_left(self._cumulative, self._part(z))
        return self._values[min(at, len(self._values) - 1)]


def routing_of(costs: StepCosts, rows: RowDistribution | None, *, ranks: int) -> Routing:
    """Drawn rows for a step whose expert-parallel groups have so many ranks; balanced without a distribution."""
    if rows is None or ranks == 1 or len(rows.values) == 1:
        return Balanced()
    first, layers = 0, [list[int]() for _ in costs.ranks]
    for stage in costs.stages:
        layers[stage.rank] += range(first, first + len(stage.layers))
        first += len(stage.layers)
    return Drawn(rows, ranks=ranks, layers=layers)
