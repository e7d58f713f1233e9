"""The pool of a plan, for rows that vary from step to step.

Each (layer, microbatch) pair whose rows are stashed receives rows of one distribution, independently of the others.
What the pool must hold besides is fixed: other tensors of stashed regions, and for each row tensor the part of a
page that its last row leaves empty. Of a row tensor that is offloaded, the usual rows leave (`offload/split.py`),
and those beyond are in pages.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagestash.planning.row_tensors import RowTensor, RowTensors
from pagestash.policy import OVERFLOW, HomeName, Policy
from pagestash.row_counts.distribution import RowDistribution
from pagestash.row_counts.pool import (
    Pair,
    RowBuffer,
    any_chance,
    each_chance,
    expected_rows_for,
    rows_beyond,
)
from pagestash.row_counts.sums import Sum
from pagestash.row_counts.tokens_per_expert import read_tokens_per_expert
from pagestash.saved.offload.split import MOSTLY

Rows = RowDistribution | str | Path | float
"""How received rows vary: a distribution, a file of tokens per expert, `"measured"`, or a max/mean."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Bytes of a pool, and where rows vary, the probability that a step overflows it."""

    bytes: int = 0
    overflow: float | None = None
    pairs: int = 0
    """Of a layer and a microbatch, whose rows are in it at the same time."""


@dataclass(slots=True)
class Skew:
    """How the rows of a step vary."""

    distribution: RowDistribution
    average: float
    overflow: float
    _sums: dict[frozenset[tuple[Pair, int]], Sum] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Rows, tensors: RowTensors, overflow: float = OVERFLOW) -> "Skew":
        """The skew of a profile with these row tensors."""
        each_chance(overflow, 1)  # refuses what is no probability
        received = tensors.received()
        found = _measured(tensors) if rows == "measured" else row_distribution(rows)
        average = found.average
        if average is None:
            average = sum(received.values()) / len(received) if received else 1.0
        return cls(found, max(1.0, average), overflow)

    def pool(
        self,
        homes: Mapping[int, HomeName],
        rows: RowTensors,
        fixed_pages: int,
        page: int,
        *,
        chances: int = 1,
    ) -> PoolSize:
        """The pool for storages that are in these homes at the same time; `fixed_pages` do not vary.

        A step has so many `chances` to overflow it: each time that as many are live.
        """
        buffers: dict[str, list[RowBuffer]] = {}
        for storage, tensor in rows.tensors.items():
            buffer = self._buffer(tensor, homes[storage]) if storage in homes else None
            if buffer is not None:
                buffers.setdefault(tensor.pair, []).append(buffer)
                fixed_pages += 1
        if not buffers:
            return PoolSize(fixed_pages * page)
        kinds = Counter(tuple(sorted(pair)) for pair in buffers.values())
        beyond = self._sum(kinds)
        part = each_chance(self.overflow, chances)
        pages = max(1, fixed_pages + math.ceil(beyond.quantile_above(part) / page))
        overflow = any_chance(beyond.above((pages - fixed_pages) * page), chances)
        return PoolSize(pages * page, overflow, len(buffers))

    def apply(self, policy: Policy, pool: PoolSize, rows: RowTensors) -> tuple[Policy, int | None]:
        """The policy with this pool, and the rows that are best left out of it; None where no layer takes them."""
        if pool.overflow is None:
            return policy, None
        policy = replace(policy, pool=replace(policy.pool, device=pool.bytes))
        if not pool.pairs or not rows.fused:
            return policy, None
        best = expected_rows_for(
            self.distribution, pool.pairs, average_rows=self.average, overflow=self.overflow
        )
        return policy, best

    def notes(self, pool: PoolSize, rows: RowTensors) -> list[str]:
        """What a reader of the plan should know about its pool."""
        if not pool.pairs:
            return ["rows: the plan puts no rows that vary into pages, so there is no pool to overflow"]
        received = rows.received()
        measured = sum(received.values()) / len(received)
        found = []
        if not rows.exact and self.distribution.average is None:
            found.append(
                "rows: some layers received no more than their expected_rows: "
                f"the average is taken as {measured:.0f}, the most it can be"
            )
        elif not 0.8 <= measured / self.average <= 1.25:
            found.append(
                f"rows: the profile's layers received {measured:.0f} on average; the pool is for {self.average:.0f}"
            )
        return found

    def _buffer(self, tensor: RowTensor, home: HomeName) -> RowBuffer | None:
        """What waits in pages; None if a tensor that is offloaded leaves as a whole."""
        head = float(tensor.expected_rows)
        if home == "offload":
            usual = self.average * self.distribution.excess(head / self.average)
            if usual >= MOSTLY * tensor.capacity:
                return None
            head += usual
        return RowBuffer(tensor.row_bytes, head, tensor.expected_rows + tensor.capacity)

    def _sum(self, kinds: Mapping[Pair, int]) -> Sum:
        key = frozenset(kinds.items())
        if key not in self._sums:
            self._sums[key] = rows_beyond(self.distribution, kinds, self.average)
        return self._sums[key]


def row_distribution(rows: RowDistribution | str | Path | float) -> RowDistribution:
    """What `rows` says by itself, without a profile."""
    if isinstance(rows, RowDistribution):
        return rows
    return read_tokens_per_expert(rows) if isinstance(rows, str | Path) else RowDistribution.log_normal(rows)


def _measured(tensors: RowTensors) -> RowDistribution:
    """The log-normal of what the layers of one step received: they are too few to show its tail."""
    received = list(tensors.received().values())
    if not received:
        raise ValueError("rows='measured': no saved tensor of the profile has rows that vary")
    if not tensors.exact:
        raise ValueError(
            "rows='measured': some layers received no more than their expected_rows, and the profile does not say "
            "how many; measure without expected_rows"
        )
    return RowDistribution.measured(received).fitted()
