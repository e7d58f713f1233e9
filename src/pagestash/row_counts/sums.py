"""The sum of many independent amounts, by Fourier transform on a grid.

Each amount is divided between its two neighbours on the grid, so that the mean is exact and the variance of the
sum grows by at most `amounts × step² / 4`. The grid is as wide as the sum is likely to be. Single amounts may be
outside and wrap around: their sum is inside, and is found in its place. With `POINTS` = 2048,

    step  =  (16 deviations of the sum + the largest single amount) / 1920

so for 500 amounts that are alike the variance comes out at most 1 % too large, never too small. What is outside
has a probability below `OUTSIDE`, which is also about how small a tail can be read off.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
        import numpy as np  # here, because most processes sum nothing

        masses = _masses(amounts, self._step)
        inside = np.roll(masses, -(first % POINTS))
        beyond = np.append(np.cumsum(inside[::-1])[::-1][1:], 0.0)
        self._beyond = (beyond / inside.sum()).tolist()
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


def _masses(amounts: Sequence[Amount], step: float) -> Any:
    """The sum's probabilities on the grid; the first is that of its mean."""
    import numpy as np

    product = np.ones(POINTS, dtype=complex)
    for values, weights, times in amounts:
        own, weight = np.asarray(values), np.asarray(weights)
        places = (own - np.dot(own, weight)) / step
        at = np.floor(places).astype(int)
        beyond = places - at
        points = np.zeros(POINTS)
        np.add.at(points, at % POINTS, weight * (1 - beyond))
        np.add.at(points, (at + 1) % POINTS, weight * beyond)
        product *= np.fft.fft(points) ** times
    return np.maximum(0.0, np.fft.ifft(product).real)
