"""What belongs to a row of the first projection: its weight, its bias, and which of two buffers it is in.

R rows of capacity, of which the first S may be in a buffer of their own (the rows that were *expected*, the
others are in *excess* of them), H = 2N columns: the gate in the first N, the linear part in the rest, or both in
turn (`interleaved`). Without a gate H = N. E experts.
Each question is answered twice, for the torch reference and in Triton.
"""

from typing import NamedTuple

import torch

from pagestash.kernels.backend import tl, triton


class RowInfo(NamedTuple):
    """What belongs to rows: how many are valid, and the weight and the bias of each.

    `weights` is flat; row r has weight `weights[order[r]]`, or `weights[r]` without an order. `bias` [E, H]
    is added by expert, whose rows end at `offsets`.
    """

    rows: torch.Tensor  # one integer on the device
    weights: torch.Tensor | None = None
    order: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    interleaved: bool = False
    """Whether gate and linear part alternate in a row, and in its bias (gpt-oss); else all gates come first."""


# --- what: the torch reference ------------------------------------------------------------------------------


def gate_and_linear(
    h_RH: torch.Tensor, info: RowInfo, *, gated: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves [R, N] of the valid rows, in float32 (float64 for that), with their bias.

    Without a gate: the whole rows, and a 1 in the place of the linear part.
    """
    wide = h_RH if h_RH.dtype == torch.float64 else h_RH.float()
    if info.bias is not None:
        assert info.offsets is not None
        row = torch.arange(h_RH.shape[0], device=h_RH.device, dtype=info.offsets.dtype)
        wide = wide + info.bias[torch.searchsorted(info.offsets, row, right=True)].to(wide.dtype)
    if not gated:
        return wide, wide.new_ones(())
    if info.interleaved:
        return wide[:, 0::2], wide[:, 1::2]
    gate, linear = wide.chunk(2, dim=1)
    return gate, linear


def row_weights(info: RowInfo, count: int, like: torch.Tensor) -> torch.Tensor:
    """The weights of the first `count` rows as a column, 1 where there are none."""
    if info.weights is None:
        return like.new_ones(count, 1)
    flat = info.weights.reshape(-1)
    at = flat[:count] if info.order is None else flat[info.order[:count].to(torch.int64)]
    return at[:, None].to(like.dtype)


# --- how: in Triton -----------------------------------------------------------------------------------------


@triton.jit
def row_weight(weights, order, row, inside, ORDERED: tl.constexpr):
    """The weights of rows, and where in `weights` they stand."""
    at = row
    if ORDERED:
        at = tl.load(order + row, mask=inside, other=0).to(tl.int64)
    return tl.load(weights + at, mask=inside, other=0.0).to(tl.float32), at


@triton.jit
def add_bias(
    value,
    bias,
    offsets,
    row,
    column,
    mask,
    experts,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Add the bias, at `column`, of the expert each row belongs to: as many experts end at or before the row."""
    each = tl.arange(0, EXPERTS)
    end = tl.load(offsets + each, mask=each < experts, other=2147483647)
    expert = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1).to(tl.int64)
    at = expert[:, None] * WIDTH + column[None, :]
    return value + tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tiles(count, split, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Tiles of expected rows, and of all; none has rows of both buffers."""
    in_expected = tl.zeros((), tl.int64)
    if SPLIT:
        in_expected = tl.minimum(count, split)
    expected_tiles = (in_expected + ROWS - 1) // ROWS
    return expected_tiles, expected_tiles + (count - in_expected + ROWS - 1) // ROWS


@triton.jit
def tile_rows(tile, expected_tiles, count, split, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """The rows of a tile in its buffer and among all, which are valid, and whether they were expected."""
    in_expected = tile < expected_tiles  # of which there are none without a buffer for them
    before = tl.zeros((), tl.int64)
    end = count
    if SPLIT:
        tile = tl.where(in_expected, tile, tile - expected_tiles)
        before = tl.where(in_expected, 0, split).to(tl.int64)
        end = tl.where(in_expected, tl.minimum(count, split), count)
    within = tile * ROWS + tl.arange(0, ROWS)
    row = before + within
    return within, row, row < end, in_expected


@triton.jit
def tile_mask(inside, column, N: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of a tile belong to valid rows, and to one of the N columns."""
    mask = inside[:, None]
    if N % BLOCK != 0:
        mask = mask & (column < N)[None, :]
    return mask


@triton.jit
def aligned(pointer, WIDE: tl.constexpr, SPLIT: tl.constexpr):
    """What the compiler no longer sees of a pointer that was chosen among two: rows begin at 16 bytes."""
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    if SPLIT:
        if WIDE:
            pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16 // SIZE))
    return pointer
