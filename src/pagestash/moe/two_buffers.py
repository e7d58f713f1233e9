"""The first projection of rows that are in two buffers: those that were expected, and those in excess of them.

Without expected rows all are in the second one; see the top of `block.py` for why there are two. R rows, E experts,
D the model's width, H the first projection's. `ends` says where each expert's rows end, in either buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from pagestash.kernels.moe.accumulate import accumulate_
from pagestash.kernels.moe.coded_rows import decode_rows
from pagestash.kernels.moe.ends import missing_ends
from pagestash.kernels.moe.grouped import grouped_mm
from pagestash.kernels.moe.permute import permute
from pagestash.kernels.moe.row_codes import RowCodes
from pagestash.moe.lease import Lease
from pagestash.moe.projection import LowRank, Projection


@dataclass(slots=True)
class Pair:
    """A tensor for the expected rows and one for the rows in excess, which this owns.

    Without expected rows all are in `excess`. A part is None where it is missing: in pages, or to be recomputed.
    """

    expected: torch.Tensor | None
    excess: torch.Tensor | None

    def take_expected(self) -> torch.Tensor | None:
        """Hand over the expected rows: their memory is free when the caller drops them."""
        taken, self.expected = self.expected, None
        return taken

    def joined(self) -> torch.Tensor:
        """All rows in one buffer: a copy where there are two."""
        assert self.excess is not None
        return self.excess if self.expected is None else torch.cat([self.expected, self.excess])


class Cut(NamedTuple):
    """Into how many expected rows and rows in excess the capacity is cut."""

    expected: int
    excess: int
    received: bool
    """Whether the rows came off the wire, so that they must wait for backward; else they are permuted again."""


class RowSource(Protocol):
    """Where backward gets rows that autograd did not save."""

    @property
    def cut(self) -> Cut: ...

    def rows(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ExcessSource:
    """Where backward gets the rows in excess of those expected, if autograd did not save them."""

    tokens_TD: torch.Tensor | None
    inverse_TK: torch.Tensor
    lease: Lease | None
    cut: Cut
    like_TD: torch.Tensor

    def rows(self, *, unless: Lease | None = None) -> torch.Tensor:
        """The rows; undefined ones where the lease `unless` got its pages."""
        if self.tokens_TD is not None:
            return permute(self.tokens_TD, self.inverse_TK, self.cut.excess)
        if self.lease is not None:
            return self.lease.restore(unless=unless)
        return self.like_TD.new_empty(0, self.like_TD.shape[1])


@dataclass(frozen=True, slots=True)
class CodedSource:
    """Where backward gets all rows from, if codes of them wait: decoded each time."""

    codes: RowCodes
    count: torch.Tensor
    cut: Cut
    like_TD: torch.Tensor

    def rows(self) -> torch.Tensor:
        capacity = self.cut.expected + self.cut.excess
        return decode_rows(self.codes, self.count, self.like_TD.new_empty(capacity, self.codes.row.width))


def recompute_missing(
    h: Pair, x: Pair, source: ExcessSource, up: Projection, ends: Pair, h_lease: Lease | None
) -> None:
    """Give `h` the parts that were not saved. (Where pages have the excess, a buffer that nobody reads.)"""
    if h.expected is None:
        h.expected = of_rows(up.forward, x.expected, ends.expected)
    if h.excess is None:
        assert ends.excess is not None
        # Rows that stay for the gradient of `up_EHD` come back whole. Few rows in one of the largest buffers do not
        # stay meanwhile: here they come back only where pages of `h` are missing, and for that gradient once more.
        stays = source.lease is None or not source.cut.expected
        x_RD = source.rows(unless=None if stays else h_lease) if x.excess is None else x.excess
        h.excess = recomputed_projection(x_RD, up, h_lease, ends.excess)
        if stays:
            x.excess = x_RD


def recomputed_projection(
    x_RD: torch.Tensor, up: Projection, lease: Lease | None, ends_E: torch.Tensor
) -> torch.Tensor:
    """The first projection in a buffer for all rows; of those in pages, nothing is computed."""
    if lease is not None:
        ends_E = missing_ends(ends_E, lease.pages)
    return up.forward(x_RD, ends_E)


def up_gradient(dh: Pair, x: Pair, source: RowSource, ends: Pair) -> torch.Tensor:
    """The gradient of `up_EHD`, of both parts; of those in excess only experts that have rows there are touched."""
    assert dh.excess is not None
    assert ends.excess is not None
    dup = None
    if dh.expected is not None:
        assert x.expected is not None
        assert ends.expected is not None
        dup = grouped_mm(dh.expected.t(), x.expected, ends.expected)
        if not source.cut.excess:
            return dup
    x_RD = source.rows() if x.excess is None else x.excess
    if dup is None:
        return grouped_mm(dh.excess.t(), x_RD, ends.excess)
    return accumulate_(dup, dh.excess, x_RD, ends.excess)


def sum_update_gradients(
    up: Projection, update: LowRank, dh: Pair, dinner: Pair, x: Pair, source: RowSource, ends: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the factors of the first projection's update: the sums of both parts."""
    x_RD = source.rows() if x.excess is None else x.excess
    parts: Any = [
        (x.expected, dh.expected, dinner.expected, ends.expected),
        (x_RD, dh.excess, dinner.excess, ends.excess),
    ]
    found = [up.update_gradients(update, *part) for part in parts if part[1] is not None and part[1].shape[0]]
    if not found:  # no row at all
        return torch.zeros_like(update.a_EKI), torch.zeros_like(update.b_EOK)
    (da, db), *more = found
    for more_a, more_b in more:
        da, db = da + more_a, db + more_b
    return da, db


def of_rows(function: Callable[..., Any], rows: torch.Tensor | None, *more: Any) -> Any:
    """What `function` makes of a buffer's rows; None of none."""
    return None if rows is None else function(rows, *more)
