"""Rows in expert order back to their tokens, and the gradient of their weights.

T tokens, K choices a token, R rows in expert order, D columns, E experts. `inverse_TK[t, k]` is the row of a
token's k-th choice, or -1. `combine` sums a token's rows in the order of k. It is the backward of `permute`, and
`permute` is the backward of `combine`: neither needs an atomic addition, and both give the same bits every time.

The rows may be in two buffers, which one launch reads: the first S, which were *expected*, and the R - S in
*excess* of them.

What moves: each of a token's rows once, and their sum once.
"""

import torch

from pagestash.kernels.backend import cdiv, choose, launch, sum_dtype, tl, triton
from pagestash.kernels.moe.routed_tiles import check_operands, tile_of


def combine(
    rows_RD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None = None,
    *,
    expected_SD: torch.Tensor | None = None,
    bias_ED: torch.Tensor | None = None,
    bias_ids_TK: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`[T, D]`: each token's rows, times their weights if given, summed in float32 for k = 0, 1, ….

    With `expected_SD` the first S rows are in that buffer, and `rows_RD` holds those after them. With `bias_ED`,
    which takes weights, each choice that has a row adds `weights_TK[t, k] * bias_ED[bias_ids_TK[t, k]]`.
    """
    check_operands(rows_RD, inverse_TK, weights_TK, "rows")
    tokens, choices = inverse_TK.shape
    width = rows_RD.shape[1]
    out_TD = torch.empty(tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    if choose(rows_RD.device, backend) == "torch":
        whole_RD = rows_RD if expected_SD is None else torch.cat([expected_SD, rows_RD])
        combine_reference(whole_RD, inverse_TK, weights_TK, bias_ED, bias_ids_TK, out_TD)
    elif out_TD.numel():
        tile = tile_of(width, rows_RD.element_size())
        first_RD = rows_RD if expected_SD is None else expected_SD
        launch(
            _combine_kernel,
            (cdiv(tokens, tile.together), tile.across),
            rows_RD.device,
            first_RD,
            rows_RD,
            first_RD.shape[0],
            inverse_TK,
            inverse_TK if weights_TK is None else weights_TK,
            rows_RD if bias_ED is None else bias_ED,
            inverse_TK if bias_ids_TK is None else bias_ids_TK,
            out_TD,
            tokens,
            width,
            K=choices,
            WEIGHTED=weights_TK is not None,
            BIASED=bias_ED is not None,
            SPLIT=expected_SD is not None,
            WHOLE=tile.whole,
            TOKENS=tile.together,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
    return out_TD


def weight_gradient(
    rows_RD: torch.Tensor, inverse_TK: torch.Tensor, gradient_TD: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Float32 [T, K]: the product of each choice's row with its token's gradient, zero where it has no row."""
    check_operands(rows_RD, inverse_TK, None, "rows")
    out_TK = torch.empty(inverse_TK.shape, dtype=torch.float32, device=rows_RD.device)
    if choose(rows_RD.device, backend) == "torch":
        at_TK = inverse_TK.to(torch.int64)
        product = torch.linalg.vecdot(rows_RD[at_TK.clamp(min=0)].float(), gradient_TD[:, None, :].float())
        out_TK.copy_(torch.where(at_TK >= 0, product, 0.0))
    elif out_TK.numel():
        launch(
            _weight_gradient_kernel,
            (inverse_TK.numel(),),
            rows_RD.device,
            rows_RD,
            inverse_TK,
            gradient_TD,
            out_TK,
            rows_RD.shape[1],
            K=inverse_TK.shape[1],
            BLOCK=1024,
            num_warps=4,
        )
    return out_TK


# --- what: the torch reference ------------------------------------------------------------------------------


def combine_reference(
    rows_RD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    bias_ED: torch.Tensor | None,
    bias_ids_TK: torch.Tensor | None,
    out_TD: torch.Tensor,
) -> None:
    if not rows_RD.shape[0]:
        out_TD.zero_()
        return
    wide = sum_dtype(rows_RD.dtype)
    total = torch.zeros(out_TD.shape, dtype=wide, device=rows_RD.device)
    for k in range(inverse_TK.shape[1]):
        here = (inverse_TK[:, k] >= 0)[:, None]
        value = rows_RD[inverse_TK[:, k].clamp(min=0).to(torch.int64)].to(wide)
        if weights_TK is not None:
            value = value * weights_TK[:, k, None].to(wide)
        if bias_ED is not None:
            assert weights_TK is not None
            assert bias_ids_TK is not None
            expert = torch.where(here[:, 0], bias_ids_TK[:, k], 0).to(torch.int64)
            value = value + weights_TK[:, k, None].to(wide) * bias_ED[expert].to(wide)
        total = torch.where(here, total + value, total)
    out_TD.copy_(total)


# --- how: the Triton kernels --------------------------------------------------------------------------------


@triton.jit
def _combine_kernel(
    first,
    excess,
    split,
    inverse,
    weights,
    bias,
    bias_ids,
    out,
    count,
    width,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    mask = inside[:, None]
    if not WHOLE:
        mask = mask & (column < width)[None, :]
    target = token.to(tl.int64)[:, None] * width + column[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for k in tl.static_range(K):
        at = token.to(tl.int64) * K + k
        row = tl.load(inverse + at, mask=inside, other=-1)
        if tl.max(row, axis=0) >= 0:
            here = mask & (row >= 0)[:, None]
            source = first + row.to(tl.int64)[:, None] * width + column[None, :]
            if SPLIT:
                # The address is chosen, not the value: one load.
                other = excess + (row - split).to(tl.int64)[:, None] * width + column[None, :]
                source = tl.where((row >= split)[:, None], other, source)
            value = tl.load(source, mask=here, other=0.0).to(tl.float32)
            if WEIGHTED:
                weight = tl.load(weights + at, mask=row >= 0, other=0.0).to(tl.float32)
                value *= weight[:, None]
                if BIASED:
                    expert = tl.load(bias_ids + at, mask=row >= 0, other=0).to(tl.int64)
                    shift = tl.load(bias + expert[:, None] * width + column[None, :], mask=here, other=0.0)
                    value += weight[:, None] * shift.to(tl.float32)
            total += value
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient_kernel(rows, inverse, gradient, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    choice = tl.program_id(0)
    row = tl.load(inverse + choice).to(tl.int64)
    token = (choice // K).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    start = 0
    # A choice without a row has nothing to sum.
    end = tl.where(row >= 0, width, 0)
    while start < end:
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        value = tl.load(rows + row * width + column, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(gradient + token * width + column, mask=mask, other=0.0).to(tl.float32)
        start += BLOCK
    tl.store(out + choice, tl.sum(total, 0))
