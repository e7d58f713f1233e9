"""Token rows into expert order.

T tokens, K choices a token, R rows in expert order, D columns, E experts. `inverse_TK[t, k]` is the row of a
token's k-th choice, or -1. `permute` writes each token to the rows of its choices. `combine` is its backward, and
it is the backward of `combine`: neither needs an atomic addition, and both give the same bits every time.

The rows may be in two buffers, which one launch writes: the first S, which were *expected*, and the R - S in
*excess* of them.

What moves: a token's row once, and each of its R rows once. (Going by rows instead would read a token's row K
times: 2.0 GiB rather than 1.1 at T=32,768, D=2048, K=8.)
"""

import torch

from pagestash.kernels.backend import cdiv, choose, launch, sum_dtype, tl, triton
from pagestash.kernels.moe.routed_tiles import check_operands, tile_of
from pagestash.kernels.moe.rows import empty_rows
from pagestash.kernels.pages.paged import (
    Pages,
    arguments,
    copy_rows,
    granted_bytes,
    page_bytes,
    page_pointers,
)


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
        tile = tile_of(width, tokens_TD.element_size(), page)
        launch(
            _permute_kernel,
            (cdiv(tokens, tile.together), tile.across),
            tokens_TD.device,
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


# --- what: the torch reference ------------------------------------------------------------------------------


def permute_reference(
    tokens_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    out_RD: torch.Tensor,
) -> None:
    token, choice = torch.nonzero(inverse_TK >= 0, as_tuple=True)
    value = tokens_TD[token]
    if weights_TK is not None:
        wide = sum_dtype(tokens_TD.dtype)
        value = (value.to(wide) * weights_TK[token, choice, None].to(wide)).to(tokens_TD.dtype)
    out_RD[inverse_TK[token, choice].to(torch.int64)] = value


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
