"""Permute tokens into rows and code them in the same pass; decode rows for the weight gradient.

The layout of codes, and their references in torch, are in `row_codes.py`.
"""

import torch

from pagestash.kernels.backend import cdiv, choose, launch, multiprocessors, power_of_two, tl, triton
from pagestash.kernels.moe.coded_tiles import store_excess, store_expected, tile_mask, tile_values
from pagestash.kernels.moe.routed_tiles import check_operands
from pagestash.kernels.moe.row_codes import (
    RowCodes,
    decode_rows_reference,
    encode_rows_reference,
    get_reference,
    put_reference,
)
from pagestash.kernels.moe.row_info import tile_rows, tiles
from pagestash.kernels.pages.eight_bits import code_lines
from pagestash.kernels.pages.paged import arguments, granted_bytes, page_bytes

LINES = 8
"""The most blocks of a tile that permutes: it has one token, so that a choice without a row is branched over."""
TILE_ROWS = 32
"""Of a tile that decodes."""
WARPS = 4
PROGRAMS_PER_SM = 8


def permute_coded(
    tokens_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    codes: RowCodes,
    out_RD: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """`permute` into `out_RD`, which it returns; each row is coded, too. A token is coded once for all choices."""
    check_operands(tokens_TD, inverse_TK, None, "tokens")
    tokens, width = tokens_TD.shape
    if choose(tokens_TD.device, backend) == "torch":
        token, choice = torch.nonzero(inverse_TK >= 0, as_tuple=True)
        at = inverse_TK[token, choice].to(torch.int64)
        out_RD[at] = tokens_TD[token]
        put_reference(encode_rows_reference(tokens_TD[token], codes.row), at, codes)
    elif tokens_TD.numel():
        page = page_bytes(codes.pages)
        expected, excess = codes.pointers()
        lines = min(power_of_two(codes.row.blocks), LINES)
        launch(
            _permute_kernel,
            (tokens, cdiv(codes.row.blocks, lines)),
            tokens_TD.device,
            tokens_TD,
            inverse_TK,
            out_RD,
            expected,
            excess,
            codes.split,
            *arguments(codes.pages, excess),
            N=width,
            **codes.constants(tokens_TD.dtype, tokens_TD.device),
            K=inverse_TK.shape[1],
            PAGED=page is not None,
            PAGE=page or 65536,
            LINES=lines,
            num_warps=2,
        )
    return out_RD


def decode_rows(
    codes: RowCodes, rows: torch.Tensor, out_RD: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """The first `rows` (an integer on the device) of coded rows of one part into `out_RD`, which it returns.

    Excess rows whose pages were refused become zeros.
    """
    if choose(out_RD.device, backend) == "torch":
        count = int(rows)
        out_RD[:count] = decode_rows_reference(get_reference(codes, count), codes.row, out_RD.dtype)
    elif out_RD.numel():
        page = page_bytes(codes.pages)
        expected, excess = codes.pointers()
        work = (cdiv(out_RD.shape[0], TILE_ROWS) + 1) * codes.row.blocks
        launch(
            _decode_kernel,
            (min(work, PROGRAMS_PER_SM * multiprocessors(out_RD.device)),),
            out_RD.device,
            out_RD,
            expected,
            excess,
            codes.split,
            rows,
            *arguments(codes.pages, excess),
            N=codes.row.width,
            **codes.constants(out_RD.dtype, out_RD.device),
            SPLIT=codes.split > 0,
            PAGED=page is not None,
            PAGE=page or 65536,
            ROWS=TILE_ROWS,
            num_warps=WARPS,
        )
    return out_RD


# --- how: in Triton -----------------------------------------------------------------------------------------


@triton.jit
def _permute_kernel(
    tokens,
    inverse,
    out,
    expected,
    excess,
    split,
    book,
    member,
    table,
    device_slab,
    host_slab,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FLOOR: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    K: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + 127) // 128
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * LINES + tl.arange(0, LINES)
    inside = block < BLOCKS
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = inside[:, None] & (column >= 0)
    if N % 128 != 0:
        mask = mask & (column < N)
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    held = (book, table, length, device_slab, host_slab)
    any_row = tl.load(inverse + token * K)
    for k in tl.static_range(1, K):
        any_row = tl.maximum(any_row, tl.load(inverse + token * K + k))
    # Masked off where the token has no row here: it may be garbage, and need not be read.
    read = block < tl.where(any_row >= 0, BLOCKS, 0)
    value = tl.load(tokens + token * N + column, mask=mask & read[:, None], other=0.0)
    code, scale = code_lines(value.to(tl.float32), FLOOR, FP8)
    for k in tl.static_range(K):
        row = tl.load(inverse + token * K + k).to(tl.int64)
        if row >= 0:
            tl.store(out + row * N + column, value, mask=mask)
            if row < split:
                store_expected(code, scale, expected, row, inside, mask, 0, block, N, PARTS, ROW)
            else:
                store_excess(
                    code, scale, excess, held, granted, row - split, inside, mask, 0, block, N, PARTS, ROW,
                    CODE_WIDE, PAGED, PAGE,
                )  # fmt: skip


@triton.jit
def _decode_kernel(
    out,
    expected,
    excess,
    split,
    rows,
    book,
    member,
    table,
    device_slab,
    host_slab,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FLOOR: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + 127) // 128
    count = tl.load(rows).to(tl.int64)
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    held = (book, table, length, device_slab, host_slab)
    expected_tiles, all_tiles = tiles(count, split, ROWS, SPLIT)
    tile = tl.program_id(0).to(tl.int64)
    while tile < all_tiles * BLOCKS:
        within, row, inside, in_expected = tile_rows(
            tile // BLOCKS, expected_tiles, count, split, ROWS, SPLIT
        )
        block = tile % BLOCKS
        x = tile_values(
            expected, excess, held, granted, in_expected, within, inside, 0, block, N, PARTS, ROW, FP8, CODE_WIDE,
            PAGED, PAGE,
        )  # fmt: skip
        target = out + row[:, None] * N + (block * 128 + tl.arange(0, 128))[None, :]
        tl.store(target, x.to(out.dtype.element_ty), mask=tile_mask(inside, block, N))
        tile += tl.num_programs(0)
