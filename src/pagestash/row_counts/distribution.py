"""The rows that a rank receives for one layer and microbatch, relative to the average: a distribution.

A distribution is a list of values and their probabilities, whether it was measured (`measured`), read from a file
(`tokens_per_expert.py`) or stated (`log_normal`): counts of rows per rank are best described as log-normal. Rows
are relative: 1.0 is the average over layers, microbatches and ranks, which under an even load is tokens of a rank
times top-k. Plain Python, without torch.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

DRAWS = 64
"""Of how many (layer, rank) pairs a stated max/mean is the most, unless told: 8 layers on 8 ranks, say."""

_REACH, _CELLS = 7.0, 1024
"""A log-normal is cut into so many cells, from so many standard deviations below its median to as many above: all
but 3e-12 of it."""
_STEEPEST = 3.0
"""The largest standard deviation of a logarithm: beyond it a few layers would have all the rows."""


@dataclass(frozen=True, slots=True)
class RowDistribution:
    """Received rows of a (layer, microbatch) pair over their average; see the classmethods for how to get one.

    >>> skewed = RowDistribution.log_normal(1.5, draws=64)
    >>> round(skewed.mean, 6), round(skewed.max_over_mean(64), 6)
    (1.0, 1.5)
    """

    values: tuple[float, ...]
    """Ascending, relative to the average."""
    weights: tuple[float, ...]
    """The probability of each value."""
    average: float | None = None
    """The rows that 1.0 stands for, where that is known."""

    def __post_init__(self) -> None:
        if not self.values or len(self.values) != len(self.weights):
            raise ValueError(
                f"rows: {len(self.values)} values and {len(self.weights)} weights: expected as many, and some"
            )
        if any(not 0 <= value < math.inf for value in self.values):
            raise ValueError("rows: a value is negative or not finite: expected 0 or more")
        if list(self.values) != sorted(set(self.values)):
            raise ValueError("rows: the values are not ascending")
        if any(not weight > 0 for weight in self.weights) or abs(sum(self.weights) - 1) > 1e-6:
            raise ValueError("rows: the weights are not positive numbers whose sum is 1")
        if self.average is not None:
            _check_average(self.average)

    # --- where it comes from ---

    @classmethod
    def measured(cls, counts: Iterable[float], *, average: float | None = None) -> "RowDistribution":
        """Rows as they were counted, each count as likely as the others; `average` is by default their mean."""
        found = Counter(map(_row_count, counts))
        total = sum(found.values())
        if not total:
            raise ValueError("rows: no row counts: expected at least one")
        mean = sum(rows * times for rows, times in found.items()) / total
        if not mean:
            raise ValueError("rows: all row counts are 0: expected some rows")
        base = mean if average is None else _check_average(average)
        known = sorted(found)
        return cls(
            tuple(rows / base for rows in known), tuple(found[rows] / total for rows in known), float(base)
        )

    @classmethod
    def log_normal(
        cls, max_over_mean: float, *, draws: int = DRAWS, average: float | None = None
    ) -> "RowDistribution":
        """A log-normal of mean 1 of which the largest of `draws` values is `max_over_mean` on average.

        1.0 is an even load.
        """
        _check_number(max_over_mean, "max/mean")
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise ValueError(f"draws={draws!r}: expected a count of (layer, rank) pairs, 1 or more")
        if max_over_mean < 1:
            raise ValueError(
                f"max/mean={max_over_mean:g}: the most is never below the mean; expected 1 or more"
            )
        if max_over_mean == 1:
            return cls((1.0,), (1.0,), average)
        low, high = 0.0, _STEEPEST
        most = _log_normal(high).max_over_mean(draws)
        if max_over_mean > most:
            raise ValueError(f"max/mean={max_over_mean:g}: expected at most {most:.3g} over {draws} draws")
        for _ in range(30):
            middle = (low + high) / 2
            if _log_normal(middle).max_over_mean(draws) < max_over_mean:
                low = middle
            else:
                high = middle
        return replace(_log_normal(high), average=average)

    def fitted(self) -> "RowDistribution":
        """The log-normal of the same mean and variance: it has a tail where few counts were measured."""
        mean, deviation = self.mean, self.deviation
        if not deviation:
            return self
        sigma = min(_STEEPEST, math.sqrt(math.log1p((deviation / mean) ** 2)))
        found = _log_normal(sigma)
        return RowDistribution(tuple(mean * value for value in found.values), found.weights, self.average)

    # --- what it says ---

    @property
    def mean(self) -> float:
        return sum(value * weight for value, weight in zip(self.values, self.weights))

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        mean = self.mean
        return math.sqrt(
            sum(weight * (value - mean) ** 2 for value, weight in zip(self.values, self.weights))
        )

    def quantile(self, part: float) -> float:
        """The least value that so large a part of all pairs does not exceed."""
        check_probability(part, "quantile")
        at = bisect_left(self._cumulative(), part * (1 - 1e-12))
        return self.values[min(at, len(self.values) - 1)]

    def above(self, value: float) -> float:
        """The probability of more than `value`."""
        return math.fsum(self.weights[bisect_right(self.values, value) :])

    def excess(self, value: float) -> float:
        """The mean of what exceeds `value`."""
        first = bisect_right(self.values, value)
        return sum(w * (v - value) for v, w in zip(self.values[first:], self.weights[first:]))

    def max_over_mean(self, draws: int = DRAWS) -> float:
        """The mean of the largest of so many independent draws, over the mean."""
        if draws < 1:
            raise ValueError(f"draws={draws!r}: expected a count of (layer, rank) pairs, 1 or more")
        below = [0.0, *(min(1.0, part) ** draws for part in self._cumulative())]
        most = sum(v * (after - before) for v, before, after in zip(self.values, below, below[1:]))
        return most / (below[-1] * self.mean)

    def _cumulative(self) -> list[float]:
        return list(accumulate(self.weights))


def _log_normal(sigma: float) -> RowDistribution:
    """The log-normal of mean 1 whose logarithm has this standard deviation: for each cell its mean."""
    edges = [_REACH * (2 * at / _CELLS - 1) for at in range(_CELLS + 1)]
    weights = [_between(low, high) for low, high in pairwise(edges)]
    parts = [_between(low - sigma, high - sigma) for low, high in pairwise(edges)]
    whole, total = sum(weights), sum(parts)
    values = [(part / total) / (weight / whole) for part, weight in zip(parts, weights)]
    return _joined(values, [weight / whole for weight in weights])


def _joined(values: Sequence[float], weights: Sequence[float]) -> RowDistribution:
    """With equal values as one: a very narrow log-normal has cells that no float tells apart."""
    found: dict[float, float] = {}
    for value, weight in zip(values, weights):
        found[value] = found.get(value, 0.0) + weight
    known = sorted(found)
    return RowDistribution(tuple(known), tuple(found[value] for value in known))


def _between(low: float, high: float) -> float:
    """The part of a normal distribution between two points, exact in both tails."""
    if low > 0:
        low, high = -high, -low
    return 0.5 * (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2)))


# --- checks ---


def check_probability(value: float, what: str) -> float:
    """The value, if it is a probability that leaves both possible."""
    _check_number(value, what)
    if not 0 < value < 1:
        raise ValueError(f"{what}={value:g}: expected a probability between 0 and 1")
    return float(value)


def _check_number(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what}={value!r}: expected a number")
    return value


def _check_average(value: float) -> float:
    if _check_number(value, "average") <= 0:
        raise ValueError(f"average={value:g}: expected more than 0 rows")
    return value


def _row_count(value: float) -> float:
    if _check_number(value, "rows") < 0:
        raise ValueError(f"rows={value:g}: expected 0 or more")
    return value
