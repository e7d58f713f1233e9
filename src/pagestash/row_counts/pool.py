"""How large a pool is for rows that vary, and how often it is too small.

A pair of a layer and a microbatch that waits for backward is *live*. With X rows received by a live pair, of which
S (`expected_rows`) stay in a buffer of their own,

    pool(S)   =  row_bytes × quantile of the sum over live pairs of max(0, X - S)
    head(S)   =  row_bytes × live pairs × S

at the quantile `1 - overflow`: a step whose sum is larger overflows the pool and runs again. Pairs are independent,
but for `alike` of them (microbatches of one layer) that receive the same. A step has several `chances` to overflow
if several ranks must agree on it, or if a pipeline has that many sets of live pairs in turn.

**Expected rows.** head + pool never falls with S: a pair that receives fewer rows than S holds S all the same. But
while nearly all receive more than S it is as good as flat, and a row in the head is never copied. So the best S is
the largest with which head + pool exceeds the smallest, that of S = 0, by no more than `slack`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from pagestash.policy import OVERFLOW
from pagestash.row_counts.distribution import RowDistribution, check_probability
from pagestash.row_counts.sums import Amount, Sum

SLACK = 0.01


class RowBuffer(NamedTuple):
    """A tensor, or several that are alike, of which the rows that a pair received wait in pages."""

    row_bytes: int
    expected_rows: float = 0
    """Rows that stay in a buffer of their own."""
    capacity: float = math.inf
    """More rows are not received."""


Pair = tuple[RowBuffer, ...]
"""What waits for the rows of one (layer, microbatch) pair."""


def rows_beyond(
    distribution: RowDistribution, pairs: Mapping[Pair, int], average_rows: float | None = None
) -> Sum:
    """The bytes in pages over all pairs; how many there are of each kind."""
    average = distribution.average if average_rows is None else average_rows
    if average is None or not average > 0:
        raise ValueError(
            f"average_rows={average_rows}: the distribution is relative; expected the rows received on average"
        )
    received = [average * value for value in distribution.values]
    amounts = []
    for pair, count in pairs.items():
        beyond = [sum(buffer.row_bytes * _beyond(rows, buffer) for buffer in pair) for rows in received]
        amounts.append(Amount(beyond, distribution.weights, count))
    return Sum(amounts)


def _beyond(rows: float, buffer: RowBuffer) -> float:
    return max(0.0, min(rows, buffer.capacity) - buffer.expected_rows)


def pool_for(
    distribution: RowDistribution,
    live: int,
    row_bytes: int,
    *,
    average_rows: float | None = None,
    expected_rows: float = 0,
    capacity: float = math.inf,
    alike: int = 1,
    chances: int = 1,
    overflow: float = OVERFLOW,
) -> int:
    """Bytes of pool that a step overflows with a probability of at most `overflow`; see the top of the file.

    >>> skewed = RowDistribution.log_normal(1.5)
    >>> pool = pool_for(skewed, live=48, row_bytes=10240, average_rows=65536)
    >>> round(pool / (48 * 10240 * 65536), 2)  # over the bytes of an even load
    1.08
    """
    pairs = _pairs(live, alike, row_bytes, expected_rows, capacity)
    beyond = rows_beyond(distribution, pairs, average_rows)
    return math.ceil(beyond.quantile_above(each_chance(overflow, chances)))


def overflow_probability(
    distribution: RowDistribution,
    live: int,
    row_bytes: int,
    pool_bytes: float,
    *,
    average_rows: float | None = None,
    expected_rows: float = 0,
    capacity: float = math.inf,
    chances: int = 1,
) -> float:
    """The probability that a step overflows a pool of that size: the inverse of `pool_for`.

    Below 1e-8 it is not exact.
    """
    pairs = _pairs(live, 1, row_bytes, expected_rows, capacity)
    one = rows_beyond(distribution, pairs, average_rows).above(pool_bytes)
    return any_chance(one, chances)


def expected_rows_for(
    distribution: RowDistribution,
    live: int,
    *,
    average_rows: float | None = None,
    overflow: float = OVERFLOW,
    slack: float = SLACK,
) -> int:
    """The most expected rows with which head plus pool is at most `slack` larger than it could be.

    >>> skewed = RowDistribution.log_normal(1.5)
    >>> expected_rows_for(skewed, live=48, average_rows=65536) / 65536 < 1
    True
    """
    if not 0 <= slack < math.inf:
        raise ValueError(f"slack={slack!r}: expected 0 or more")
    part = each_chance(overflow, 1)

    def held(rows: float) -> float:
        beyond = rows_beyond(distribution, _pairs(live, 1, 1, rows), average_rows)
        return live * rows + beyond.quantile_above(part)

    most = (1 + slack) * held(0)
    low, high = 0.0, most / live
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) <= most else (low, middle)
    average = distribution.average if average_rows is None else average_rows
    return int(min(low, (average or 0.0) * distribution.values[-1]))


def _pairs(
    live: int, alike: int, row_bytes: int, expected_rows: float, capacity: float = math.inf
) -> dict[Pair, int]:
    """Live pairs as independent ones: `alike` of them are one of so many times the bytes."""
    for name, value in (("live", live), ("alike", alike), ("row_bytes", row_bytes)):
        _check_count(name, value)
    if not expected_rows >= 0 or not capacity > 0:
        raise ValueError(
            f"expected_rows={expected_rows}, capacity={capacity}: expected 0 rows or more, and a capacity"
        )
    whole, rest = divmod(live, alike)
    sizes = {row_bytes * alike: whole, row_bytes * rest: 1 if rest else 0}
    return {(RowBuffer(size, expected_rows, capacity),): count for size, count in sizes.items() if count}


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a count of 1 or more")


def each_chance(overflow: float, chances: int) -> float:
    """The probability of each of several independent chances, if `overflow` is that of any."""
    check_probability(overflow, "overflow")
    _check_count("chances", chances)
    return -math.expm1(math.log1p(-overflow) / chances)


def any_chance(one: float, chances: int) -> float:
    """The probability of any of several chances of probability `one`."""
    return 1.0 if one >= 1 else -math.expm1(chances * math.log1p(-one))
