"""Received rows in two buffers, those that were expected and those in excess: what is computed of each, or both.

E experts, and the rest as in `received.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagestash.kernels.moe import gated
from pagestash.kernels.moe.accumulate import accumulate_
from pagestash.kernels.moe.ends import cut_bounds, missing_bounds
from pagestash.kernels.moe.route import Routing
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.moe.lease import Lease, pages_of
from pagestash.moe.projection import Projection
from pagestash.moe.saving import BlockOptions, Saving
from pagestash.saved.packed import Packed


@dataclass(slots=True)
class Pair:
    """A tensor for the expected rows and one for the rows in excess; None where it is in pages, or recomputed."""

    expected: torch.Tensor | None = None
    excess: torch.Tensor | None = None

    def joined(self) -> torch.Tensor:
        """All rows in one buffer: a copy where there are two."""
        assert self.excess is not None
        return self.excess if self.expected is None else torch.cat([self.expected, self.excess])


class Cut(NamedTuple):
    """How many rows are expected, how many in excess, and where each expert's begin and end in either buffer."""

    expected: int
    excess: int
    expected_bounds: torch.Tensor | None
    excess_bounds: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """The valid rows in excess."""
        return self.excess_bounds[-1:]


def cut_at(routing: Routing, options: BlockOptions, expected_rows: int) -> Cut:
    capacity = routing.order.numel()
    expected = min(max(expected_rows, 0), capacity)
    log = None
    if options.counted and options.needs_backward:
        log = options.counted.log_on(routing.order.device)
    if expected or log is not None:
        bounds = cut_bounds(routing.bounds, expected, log=log)
        if expected:
            return Cut(expected, capacity - expected, *bounds)
    return Cut(0, capacity, None, routing.bounds)


class PutAway(NamedTuple):
    """Rows that were put away, and how wide they are; None for a buffer without any."""

    expected: Packed | None
    excess: Packed | None
    width: int

    @classmethod
    def of(cls, rows_RX: torch.Tensor, saving: Saving, cut: Cut, rows: torch.Tensor) -> "PutAway":
        """`rows_RX`, of which so many are valid, in two buffers as `cut` says."""
        expected, excess = rows_RX[: cut.expected], rows_RX[cut.expected :]
        return cls(
            saving.put_away(expected, rows, sized=True) if cut.expected else None,
            saving.put_away(excess, cut.rows) if cut.excess else None,
            rows_RX.shape[1],
        )

    def pair(self, like_SD: torch.Tensor) -> Pair:
        """The rows that came back."""
        expected, excess = (None if part is None else part.unpack() for part in self[:2])
        return Pair(expected, like_SD.new_empty(0, self.width) if excess is None else excess)


def restored(lease: Lease | None, like_SD: torch.Tensor, *, unless: Lease | None = None) -> torch.Tensor:
    """The rows in excess out of their pages; undefined ones where the lease `unless` got its pages."""
    return like_SD.new_empty(0, like_SD.shape[1]) if lease is None else lease.restore(unless=unless)


def recompute_missing(
    h: Pair,
    x: Pair,
    up: Projection,
    cut: Cut,
    x_lease: Lease | None,
    h_lease: Lease | None,
    like_SD: torch.Tensor,
) -> None:
    """Give `h` the parts that were not saved. (Where pages have the excess, a buffer that nobody reads.)"""
    if h.expected is None:
        h.expected = of_rows(up.forward, x.expected, cut.expected_bounds)
    if h.excess is None:
        # Rows that stay for the gradient of `up` come back whole. Few rows in one of the largest buffers do not
        # stay meanwhile: here they come back only where pages of `h` are missing, and for that gradient once more.
        stays = x_lease is None or not cut.expected
        x_RD = x.excess
        if x_RD is None:
            x_RD = restored(x_lease, like_SD, unless=None if stays else h_lease)
        missing = cut.excess_bounds if h_lease is None else missing_bounds(cut.excess_bounds, h_lease.pages)
        h.excess = up.forward(x_RD, missing)
        if stays:
            x.excess = x_RD


def activation_gradient(
    h: Pair,
    da_RN: torch.Tensor,
    info: RowInfo,
    options: BlockOptions,
    lease: Lease | None,
    *,
    in_place: bool,
) -> tuple[Pair, torch.Tensor, torch.Tensor | None]:
    """The gradients of `h` and of the weights, and the activation once more; `in_place` over `h` and `da_RN`."""
    assert h.excess is not None
    dh = Pair(h.expected)
    if h.expected is not None and not in_place:
        dh.expected = torch.empty_like(h.expected)
    dh.excess, a_RN, dweights_SK = gated.backward(
        h.excess,
        da_RN,
        info,
        options.activation,
        pages_of(lease),
        expected_SH=h.expected,
        dexpected_SH=dh.expected,
        in_place=in_place,
    )
    return dh, a_RN, dweights_SK


def up_gradient(up: Projection, dh: Pair, x: Pair, cut: Cut) -> torch.Tensor:
    """The gradient of `up`, of both parts; of those in excess only experts that have rows there are touched."""
    assert dh.excess is not None
    assert x.excess is not None
    dup = None
    if dh.expected is not None:
        assert x.expected is not None
        assert cut.expected_bounds is not None
        dup = up.gradient(dh.expected, x.expected, cut.expected_bounds)
        if not cut.excess:
            return dup
    if dup is None:
        return up.gradient(dh.excess, x.excess, cut.excess_bounds)
    if not dup.is_contiguous():  # stored as the weight is, with columns and rows exchanged
        accumulate_(dup.mT, x.excess, dh.excess, cut.excess_bounds[1:])
        return dup
    return accumulate_(dup, dh.excess, x.excess, cut.excess_bounds[1:])


def update_gradients(
    up: Projection,
    dh: Pair,
    dinner: Pair,
    x: Pair,
    cut: Cut,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the factors of the first projection's update: the sums of both parts."""
    parts: Any = [
        (x.expected, dh.expected, dinner.expected, cut.expected_bounds),
        (x.excess, dh.excess, dinner.excess, cut.excess_bounds),
    ]
    found = [up.update_gradients(*part) for part in parts if part[1] is not None and part[1].shape[0]]
    if not found:  # no row at all
        assert up.update is not None
        return torch.zeros_like(up.update.a_EKI), torch.zeros_like(up.update.b_EOK)
    (da, db), *more = found
    for more_a, more_b in more:
        da, db = da + more_a, db + more_b
    return da, db


def of_rows(function: Callable[..., Any], rows: torch.Tensor | None, *more: Any) -> Any:
    """What `function` makes of a buffer's rows; None of none."""
    return None if rows is None else function(rows, *more)
