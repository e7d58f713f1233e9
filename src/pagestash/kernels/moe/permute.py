"""Token rows into expert order, and back to their tokens.

T tokens, K choices a token, R rows in expert order, D columns, E experts. `inverse_TK[t, k]` is the row of a
token's k-th choice, or -1. `permute` writes each token to the rows of its choices, `combine` sums a token's rows
in the order of k. Each is the other's backward, so neither direction needs an atomic addition, and both give the
same bits every time.

The rows may be in two buffers: the first S, which were *expected*, and the R - S in *excess* of them. Both are
written or read by one launch.

What moves: a token's row once, and each of its R rows once. (Going by rows instead would read a token's row K
times: 2.0 GiB rather than 1.1 at T=32,768, D=2048, K=8.)
"""

from functools import cache
from typing import NamedTuple

import torch

from pagestash.kernels.backend import cdiv, choose, tl, triton
from pagestash.kernels.moe.rows import empty_rows
from pagestash.kernels.pages.paged import (
    Pages,
    arguments,
    copy_rows,
    granted_bytes,
    is_wide,
    page_bytes,
    page_pointers,
    widest_block,
)

COLUMNS = 1024
"""The most of a tile, which then has one token: a choice without a row is branched over, not masked off."""
ELEMENTS = 4096
"""Of a tile of fewer columns."""


def permute(
    tokens_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    capacity: int,
    weights_TK: torch.Tensor | None = None,
    *,
    out_RD: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`[capacity, D]` with each token at the rows of its choices, times their weights, if given.

    Rows that no choice has are left as they are: uninitialised, or what `out_RD` holds there.
    """
    return permute_split(tokens_TD, inverse_TK, 0, capacity, weights_TK, excess_RD=out_RD, backend=backend)[1]


def permute_split(
    tokens_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    expected: int,
    capacity: int,
    weights_TK: torch.Tensor | None = None,
    *,
    excess_RD: torch.Tensor | None = None,
    pages: Pages | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`permute` into two buffers: of the first `expected` rows, None without any, and of the others.

    The buffer of the others, in excess, may be given. With `pages` they are stashed as they are written, where
    pages were granted.
    """
    check_operands(tokens_TD, inverse_TK, weights_TK, "tokens")
    tokens, width = tokens_TD.shape
    expected_SD = empty_rows(expected, width, tokens_TD) if expected else None
    if excess_RD is None:
        excess_RD = empty_rows(capacity - expected, width, tokens_TD)
    if choose(tokens_TD.device, backend) == "torch":
        if expected_SD is None:
            permute_reference(tokens_TD, inverse_TK, weights_TK, excess_RD)
        else:
            out_RD = torch.cat([expected_SD, excess_RD])
            permute_reference(tokens_TD, inverse_TK, weights_TK, out_RD)
            expected_SD.copy_(out_RD[:expected])
            excess_RD.copy_(out_RD[expected:])
        if pages is not None:
            copy_rows(pages, excess_RD, to_pages=True)
    elif tokens_TD.numel():
        page = page_bytes(pages)
        tile = _tile(width, tokens_TD.element_size(), page)
        _permute_kernel[(cdiv(tokens, tile.together), tile.across)](
            tokens_TD,
            inverse_TK,
            inverse_TK if weights_TK is None else weights_TK,
            excess_RD if expected_SD is None else expected_SD,
            excess_RD,
            expected,
            tokens,
            width,
            *arguments(pages, excess_RD),
            K=inverse_TK.shape[1],
            WEIGHTED=weights_TK is not None,
            SPLIT=expected > 0,
            PAGED=page is not None,
            PAGE=page or 65536,
            WIDE=tile.wide,
            WITHIN=tile.within,
            WHOLE=tile.whole,
            TOKENS=tile.together,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
    return expected_SD, excess_RD


def combine(
    rows_RD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None = None,
    *,
    expected_SD: torch.Tensor | None = None,
    bias_ED: torch.Tensor | None = None,
    bias_ids_TK: torch.Tensor | None = None,
    bias_weights_TK: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`[T, D]`: each token's rows, times their weights if given, summed in float32 for k = 0, 1, ….

    With `expected_SD` the first S rows are in that buffer, and `rows_RD` holds those after them. With `bias_ED`
    each choice that has a row adds `bias_weights_TK[t, k] * bias_ED[bias_ids_TK[t, k]]`.
    """
    check_operands(rows_RD, inverse_TK, weights_TK, "rows")
    tokens, choices = inverse_TK.shape
    width = rows_RD.shape[1]
    out_TD = torch.empty(tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    if choose(rows_RD.device, backend) == "torch":
        whole_RD = rows_RD if expected_SD is None else torch.cat([expected_SD, rows_RD])
        combine_reference(whole_RD, inverse_TK, weights_TK, bias_ED, bias_ids_TK, bias_weights_TK, out_TD)
    elif out_TD.numel():
        tile = _tile(width, rows_RD.element_size())
        first_RD = rows_RD if expected_SD is None else expected_SD
        _combine_kernel[(cdiv(tokens, tile.together), tile.across)](
            first_RD,
            rows_RD,
            first_RD.shape[0],
            inverse_TK,
            inverse_TK if weights_TK is None else weights_TK,
            rows_RD if bias_ED is None else bias_ED,
            inverse_TK if bias_ids_TK is None else bias_ids_TK,
            inverse_TK if bias_weights_TK is None else bias_weights_TK,
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
        _weight_gradient_kernel[(inverse_TK.numel(),)](
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


def check_operands(
    rows_RD: torch.Tensor, inverse_TK: torch.Tensor, weights_TK: torch.Tensor | None, name: str
) -> None:
    """The kernels take them as contiguous."""
    if rows_RD.ndim != 2 or not rows_RD.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(rows_RD.shape)}: expected a contiguous [rows, width]")
    if inverse_TK.ndim != 2 or not inverse_TK.is_contiguous():
        raise ValueError(f"inverse of shape {tuple(inverse_TK.shape)}: expected a contiguous [tokens, K]")
    if weights_TK is not None and (weights_TK.shape != inverse_TK.shape or not weights_TK.is_contiguous()):
        raise ValueError(f"weights {tuple(weights_TK.shape)}: expected contiguous {tuple(inverse_TK.shape)}")


class _Tile(NamedTuple):
    block: int
    """Its columns."""
    together: int
    """Its tokens."""
    across: int
    """Tiles side by side in a row."""
    whole: bool
    """Whether they make up the row exactly."""
    wide: bool
    """Whether each begins at a multiple of 16 bytes."""
    within: bool
    """Whether each lies in one page."""
    warps: int


@cache
def _tile(width: int, element_size: int, page: int | None = None) -> _Tile:
    block = widest_block(width, COLUMNS, element_size, page)
    whole = width % block == 0
    return _Tile(
        block,
        1 if block == COLUMNS else max(1, ELEMENTS // block),
        cdiv(width, block),
        whole,
        is_wide(width, block, element_size),
        page is not None and whole and page % (block * element_size) == 0,
        2 if block == COLUMNS else 4,
    )


# --- what: the torch reference ------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def permute_reference(
    tokens_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    out_RD: torch.Tensor,
) -> None:
    token, choice = torch.nonzero(inverse_TK >= 0, as_tuple=True)
    value = tokens_TD[token]
    if weights_TK is not None:
        wide = _wide(tokens_TD.dtype)
        value = (value.to(wide) * weights_TK[token, choice, None].to(wide)).to(tokens_TD.dtype)
    out_RD[inverse_TK[token, choice].to(torch.int64)] = value


def combine_reference(
    rows_RD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    bias_ED: torch.Tensor | None,
    bias_ids_TK: torch.Tensor | None,
    bias_weights_TK: torch.Tensor | None,
    out_TD: torch.Tensor,
) -> None:
    if not rows_RD.shape[0]:
        out_TD.zero_()
        return
    wide = _wide(rows_RD.dtype)
    total = torch.zeros(out_TD.shape, dtype=wide, device=rows_RD.device)
    for k in range(inverse_TK.shape[1]):
        here = (inverse_TK[:, k] >= 0)[:, None]
        value = rows_RD[inverse_TK[:, k].clamp(min=0).to(torch.int64)].to(wide)
        if weights_TK is not None:
            value = value * weights_TK[:, k, None].to(wide)
        if bias_ED is not None:
            assert bias_ids_TK is not None
            assert bias_weights_TK is not None
            expert = torch.where(here[:, 0], bias_ids_TK[:, k], 0).to(torch.int64)
            value = value + bias_weights_TK[:, k, None].to(wide) * bias_ED[expert].to(wide)
        total = torch.where(here, total + value, total)
    out_TD.copy_(total)


# --- how: the Triton kernels --------------------------------------------------------------------------------


@triton.jit
def _permute_kernel(
    tokens,
    inverse,
    weights,
    expected,
    excess,
    split,
    count,
    width,
    book,
    member,
    table,
    device_slab,
    host_slab,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    WITHIN: tl.constexpr,
    WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SIZE: tl.constexpr = excess.dtype.element_ty.primitive_bitwidth // 8
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = token < count
    mask = inside[:, None]
    if not WHOLE:
        mask = mask & (column < width)[None, :]
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    # Masked off where the token has no row here: it may be garbage, and need not be read.
    any_row = tl.zeros((TOKENS,), tl.int32) - 1
    for k in tl.static_range(K):
        any_row = tl.maximum(any_row, tl.load(inverse + token.to(tl.int64) * K + k, mask=inside, other=-1))
    value = tl.load(
        tokens + token.to(tl.int64)[:, None] * width + column[None, :],
        mask=mask & (any_row >= 0)[:, None],
        other=0.0,
    )
    for k in tl.static_range(K):
        at = token.to(tl.int64) * K + k
        row = tl.load(inverse + at, mask=inside, other=-1)
        if tl.max(row, axis=0) >= 0:
            scaled = value
            if WEIGHTED:
                weight = tl.load(weights + at, mask=row >= 0, other=0.0).to(tl.float32)
                scaled = (value.to(tl.float32) * weight[:, None]).to(value.dtype)
            if SPLIT:
                target = expected + row.to(tl.int64)[:, None] * width + column[None, :]
                tl.store(target, scaled, mask=mask & ((row >= 0) & (row < split))[:, None])
                row -= split
            # Few rows or none are in excess: most tiles need not even work out where they would go.
            if tl.max(row, axis=0) >= 0:
                target = excess + row.to(tl.int64)[:, None] * width + column[None, :]
                tl.store(target, scaled, mask=mask & (row >= 0)[:, None])
                if PAGED:
                    if granted:
                        first = (row.to(tl.int64) * width + start) * SIZE
                        held = (book, table, length, device_slab, host_slab)
                        to = page_pointers(
                            held, first, tl.arange(0, BLOCK), row >= 0, excess, PAGE, WIDE, WITHIN
                        )
                        tl.store(to, scaled, mask=mask & (row >= 0)[:, None])


@triton.jit
def _combine_kernel(
    first,
    excess,
    split,
    inverse,
    weights,
    bias,
    bias_ids,
    bias_weights,
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
                value *= tl.load(weights + at, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
            if BIASED:
                expert = tl.load(bias_ids + at, mask=row >= 0, other=0).to(tl.int64)
                weight = tl.load(bias_weights + at, mask=row >= 0, other=0.0).to(tl.float32)
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
