"""The experts' block where what waits is coded in eight bits: from the tokens to the activation, and its gradient.

    x_TD -permute-> x_RD, codes of x -up-> h_RH -gated activation-> a_RN, codes of h

R rows of capacity in expert order, T tokens, D the model's width, N an expert's, H the first projection's. The
codes of the S expected rows are in buffers that stay, those of rows in excess in pages, as ever (see `block.py`).
Rows and projection live for one layer, so they are in one buffer each, and products over them are single ones.

| | coded by | decoded by |
| --- | --- | --- |
| `h_RH` | the kernel of the activation | the kernel of its gradient |
| `x_RD`, where rows were received | the kernel that permutes | a pass before the gradient of `up` |

That pass stays: a product cannot read codes.
"""

from typing import NamedTuple

import torch

from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activations import as_activation
from pagestash.kernels.moe.coded_rows import permute_coded
from pagestash.kernels.moe.permute import permute
from pagestash.kernels.moe.row_codes import CodeRow, RowCodes
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.moe.lease import Lease, pages_of
from pagestash.moe.projection import Projection
from pagestash.moe.saving import BlockOptions
from pagestash.moe.two_buffers import CodedSource, Cut, ExcessSource, Pair, RowSource


class BlockSaved(NamedTuple):
    """What waits for backward: tensors that autograd saves, and pages. Of a block that codes, both are codes."""

    x: Pair
    x_lease: Lease | None
    h: Pair
    h_lease: Lease | None


def forward_coded(
    x_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    up: Projection,
    info: RowInfo,
    cut: Cut,
    excess_rows: torch.Tensor,
    options: BlockOptions,
    *,
    saves_x: bool,
) -> tuple[torch.Tensor, BlockSaved]:
    """`a_RN`, and what waits."""
    capacity = cut.expected + cut.excess
    columns = up.weight_EOI.shape[1]
    # The blocks of what lives for this layer, before those of what stays, which would be cut out of them.
    x_RD = x_TD.new_empty(capacity, x_TD.shape[1])
    h_room = x_TD.new_empty(capacity, columns)
    parts = as_activation(options.activation).parts
    a_room = x_TD.new_empty(capacity, columns // parts)
    sizes = (cut.expected, cut.excess, excess_rows, x_TD.device)
    x, x_lease = Pair(None, None), None
    if cut.received and saves_x:
        x_codes, x_lease = options.x.codes(CodeRow(1, x_TD.shape[1]), *sizes)
        x = Pair(x_codes.expected_SC, x_codes.excess_RC)
        permute_coded(x_TD, inverse_TK, x_codes, x_RD)
    else:
        permute(x_TD, inverse_TK, capacity, out_RD=x_RD)
    h_codes, h_lease = options.h.codes(CodeRow(parts, columns // parts), *sizes)
    assert info.offsets is not None
    del h_room
    h_RH = up.forward(x_RD, info.offsets)
    del a_room
    a_RN = gated.forward(h_RH, info, options.activation, codes=h_codes)
    # (The block of `x_RD` is let go here, and serves the output of the second projection.)
    return a_RN, BlockSaved(x, x_lease, Pair(h_codes.expected_SC, h_codes.excess_RC), h_lease)


def codes_of(row: CodeRow, saved: Pair, lease: Lease | None) -> RowCodes:
    """Where codes are, as backward finds them."""
    return RowCodes(row, saved.expected, saved.excess, pages_of(lease))


def source_of_codes(
    x: Pair,
    lease: Lease | None,
    count: torch.Tensor,
    tokens_TD: torch.Tensor | None,
    inverse_TK: torch.Tensor,
    cut: Cut,
    like_TD: torch.Tensor,
) -> tuple[RowSource, Pair]:
    """Where backward gets the rows from, and the rows that it has: none."""
    if not cut.received:
        return ExcessSource(tokens_TD, inverse_TK, None, cut, like_TD), Pair(None, None)
    codes = codes_of(CodeRow(1, like_TD.shape[1]), x, lease)
    return CodedSource(codes, count, cut, like_TD), Pair(None, None)
