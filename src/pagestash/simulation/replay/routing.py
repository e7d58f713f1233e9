"""Rows per (layer, microbatch, rank) when routing is skewed.

Rows of a layer are drawn for each rank of an expert-parallel group from a distribution (`row_counts/`: stated,
or counted in a run), and scaled so that their mean over the group is 1: rows move between ranks, none are lost. A
rank that is hot for one microbatch is so for the next ones, too, because experts have their subjects and
neighbouring data have the same: with z normal and F the distribution,

    rows = F⁻¹(Φ(√c · z[layer, rank] + √(1 − c) · z[layer, rank, microbatch]))        c = CORRELATION

Time goes by the hottest rank of each layer. Memory is that of one rank: of a pipeline rank's group the one that
receives most in the whole step.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import sqrt
from statistics import NormalDist

from pagestash.row_counts.distribution import RowDistribution
from pagestash.simulation.costs.costs import StepCosts

CORRELATION = 0.8
"""Between microbatches of one step: an assumption, no measurement."""
PERIOD = 32
"""Microbatches after which the draws repeat: enough of them for a mean, and few enough for any step."""


class Routing:
    """Received rows over balanced ones. `layers` are the layers of each pipeline rank, numbered through the model.

    Layers of which it knows nothing are balanced.
    """

    def __init__(
        self,
        rows: RowDistribution | None = None,
        *,
        ranks: int = 1,
        layers: Sequence[Sequence[int]] = (),
        seed: int = 0,
    ) -> None:
        self._hottest: dict[int, list[float]] = {}
        self._held: dict[int, list[float]] = {}
        if rows is None or ranks == 1 or len(rows.values) == 1:
            return
        draw = random.Random(seed).gauss
        for own in layers:
            drawn = {layer: list(_tables(rows, ranks, draw)) for layer in own}
            totals = [sum(row[rank] for table in drawn.values() for row in table) for rank in range(ranks)]
            fullest = max(range(ranks), key=totals.__getitem__)
            for layer, table in drawn.items():
                self._hottest[layer] = [max(row) for row in table]
                self._held[layer] = [row[fullest] for row in table]

    def hottest(self, layer: int, microbatch: int) -> float:
        """Of the rank that receives most: the others wait for it."""
        return self._hottest[layer][microbatch % PERIOD] if layer in self._hottest else 1.0

    def held(self, layer: int, microbatch: int) -> float:
        """Of the rank whose memory is reported."""
        return self._held[layer][microbatch % PERIOD] if layer in self._held else 1.0


def _tables(
    rows: RowDistribution, ranks: int, gauss: Callable[[float, float], float]
) -> Iterator[list[float]]:
    """Rows of each rank for one layer, microbatch by microbatch."""
    cumulative, part = list(accumulate(rows.weights)), NormalDist().cdf
    fixed = [sqrt(CORRELATION) * gauss(0, 1) for _ in range(ranks)]
    for _ in range(PERIOD):
        drawn = (bisect_left(cumulative, part(z + sqrt(1 - CORRELATION) * gauss(0, 1))) for z in fixed)
        row = [rows.values[min(at, len(cumulative) - 1)] for at in drawn]
        mean = sum(row) / ranks
        yield [value / mean for value in row] if mean else [1.0] * ranks


def routing_of(costs: StepCosts, rows: RowDistribution | None, *, ranks: int) -> Routing:
    """For a step whose expert-parallel groups have so many ranks; balanced without a distribution."""
    first, own = 0, {}
    for stage in costs.stages:
        own[stage.stage] = range(first, first + len(stage.layers))
        first += len(stage.layers)
    layers = [[layer for stage in rank.stages for layer in own[stage.stage]] for rank in costs.ranks]
    return Routing(rows, ranks=ranks, layers=layers)
