"""The sum of many independent amounts, by Fourier transform on a grid.

Each amount is divided between its two neighbours on the grid, so that the mean is exact and the variance of the
sum grows by at most `amounts × step² / 4`. The grid is as wide as the sum is likely to be. Single amounts may be
outside and wrap around: their sum is inside, and is found in its place. With `POINTS` = 2048,

    step  =  (16 deviations of the sum + the largest single amount) / 1920

so for 500 amounts that are alike the variance comes out at most 1 % too large, never too small. What is outside
has a probability below `OUTSIDE`, which is also about how small a tail can be read off.
"""

import cmath
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

POINTS = 2048
MARGIN = 64
"""Points at both ends for what the division among neighbours adds."""
OUTSIDE = 1e-9


class Amount(NamedTuple):
    """A random amount, and how many independent ones there are."""

    values: Sequence[float]
    """Ascending."""
    weights: Sequence[float]
    times: int

    @property
    def mean(self) -> float:
        return sum(value * weight for value, weight in zip(self.values, self.weights))

    @property
    def variance(self) -> float:
        mean = self.mean
        return sum(weight * (value - mean) ** 2 for value, weight in zip(self.values, self.weights))

    def largest(self) -> float:
        """What none of them exceeds, but with probability `OUTSIDE`."""
        left = OUTSIDE / self.times
        at = len(self.values) - 1
        while at and left > self.weights[at]:
            left -= self.weights[at]
            at -= 1
        return self.values[at]


class Sum:
    """The distribution of the sum of all amounts."""

    def __init__(self, amounts: Sequence[Amount]) -> None:
        amounts = [amount for amount in amounts if amount.times]
        self.mean = sum(amount.times * amount.mean for amount in amounts)
        self.least = sum(amount.times * amount.values[0] for amount in amounts)
        self.most = sum(amount.times * amount.values[-1] for amount in amounts)
        deviation = math.sqrt(sum(amount.times * amount.variance for amount in amounts))
        jump = max((amount.largest() - amount.mean for amount in amounts), default=0.0)
        low = max(self.least, self.mean - 8 * deviation)
        high = min(self.most, self.mean + 8 * deviation + jump)
        self._step = (high - low) / (POINTS - 2 * MARGIN)
        if self._step <= 1e-12 * self.most:  # nothing varies
            self._step = 0.0
            return
        first = math.floor((low - self.mean) / self._step) - MARGIN
        self._first = self.mean + first * self._step
        masses = _masses(amounts, self._step)
        left = 0.0
        beyond = [0.0] * POINTS
        for at in range(POINTS - 1, -1, -1):
            beyond[at] = left
            left += masses[(first + at) % POINTS]
        self._beyond = [part / left for part in beyond]
        """For each point of the grid, the probability of more."""

    def above(self, value: float) -> float:
        """The probability of more than `value`."""
        if value >= self.most or not self._step:
            return float(value < self.mean and not self._step)
        at = math.floor((value - self._first) / self._step + 1e-6)
        return 1.0 if at < 0 or value < self.least else self._beyond[min(at, POINTS - 1)]

    def quantile_above(self, part: float) -> float:
        """The least value, to one step of the grid, that is exceeded with a probability of at most `part`."""
        if not self._step:
            return self.mean
        at = next(at for at, beyond in enumerate(self._beyond) if beyond <= part)
        return min(self.most, max(self.least, self._first + at * self._step))


def _masses(amounts: Sequence[Amount], step: float) -> list[float]:
    """The sum's probabilities on the grid; the first is that of its mean."""
    product = [complex(1)] * POINTS
    for values, weights, times in amounts:
        mean = sum(value * weight for value, weight in zip(values, weights))
        points = [0.0] * POINTS
        for value, weight in zip(values, weights):
            place = (value - mean) / step
            at = math.floor(place)
            points[at % POINTS] += weight * (1 - (place - at))
            points[(at + 1) % POINTS] += weight * (place - at)
        product = [old * new**times for old, new in zip(product, _transform(points))]
    back = _transform([value.conjugate() for value in product])
    return [max(0.0, value.real / POINTS) for value in back]


def _transform(values: Sequence[complex]) -> list[complex]:
    """The discrete Fourier transform of a power of two of values."""
    count = len(values)
    if count == 1:
        return [complex(values[0])]
    even, odd = _transform(values[::2]), _transform(values[1::2])
    turned = [turn * value for turn, value in zip(_turns(count), odd)]
    return [one + other for one, other in zip(even, turned)] + [
        one - other for one, other in zip(even, turned)
    ]


@lru_cache(maxsize=32)
def _turns(count: int) -> list[complex]:
    return [cmath.exp(-2j * cmath.pi * at / count) for at in range(count // 2)]
