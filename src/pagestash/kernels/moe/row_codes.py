"""Rows in eight bits, coded by the kernels that write them and read where they wait.

R rows of capacity, of which the first S were *expected* and the others are in *excess*. A row has P parts of N
values: the first projection two, its gate and its linear part, and a row off the wire one, of D values. Its codes
are C bytes:

    P · N codes, part after part;  P · B scales, one for each block of 128 values of a part;  padding to 16

If N is a multiple of 128, these are the bytes of `encode` for a row of P · N values. The codes themselves, and
their error, are those of `kernels/pages/eight_bits.py`. Rows past the valid ones are neither written nor read.

The codes of expected rows are in a buffer that waits, those of excess rows in pages, or in a buffer, too.
"""

from dataclasses import dataclass
from typing import Any

import torch

from pagestash.kernels.backend import cdiv, choose, multiprocessors, power_of_two, tl, triton
from pagestash.kernels.moe.permute import check_operands
from pagestash.kernels.moe.row_info import tile_rows, tiles
from pagestash.kernels.pages.chunks import page_address
from pagestash.kernels.pages.eight_bits import (
    BLOCK,
    FLOOR,
    CodeShape,
    code_lines,
    converts,
    decode_reference,
    encode_reference,
    values_of_lines,
)
from pagestash.kernels.pages.paged import (
    Pages,
    arguments,
    copy_rows,
    granted_bytes,
    page_bytes,
    page_pointers,
)

LINES = 8
"""The most blocks of a tile that permutes: it has one token, so that a choice without a row is branched over."""
TILE_ROWS = 32
"""Of a tile that decodes."""
WARPS = 4
PROGRAMS_PER_SM = 8


@dataclass(frozen=True, slots=True)
class CodeRow:
    """How one row is coded: so many parts, of so many values."""

    parts: int
    width: int

    @property
    def blocks(self) -> int:
        """Of one part."""
        return cdiv(self.width, BLOCK)

    @property
    def bytes(self) -> int:
        return cdiv(self.parts * (self.width + self.blocks), 16) * 16


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Where the codes of one tensor's rows are."""

    row: CodeRow
    expected_SC: torch.Tensor | None
    excess_RC: torch.Tensor | None
    """None where they are in `pages`, or there are none."""
    pages: Pages | None

    @property
    def split(self) -> int:
        """Expected rows."""
        return 0 if self.expected_SC is None else self.expected_SC.shape[0]

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of expected and excess rows, for a kernel; any bytes where there are none."""
        excess = self.excess_RC if self.pages is None else self.pages.memory.device_slab
        first, second = self.expected_SC, excess
        if first is None or second is None:
            first = second = first if second is None else second
        assert first is not None
        assert second is not None
        return first, second

    def constants(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """What a kernel that writes or reads the codes is compiled for, besides pages and the split."""
        return {
            "PARTS": self.row.parts,
            "ROW": self.row.bytes,
            "FLOOR": FLOOR[dtype],
            "FP8": converts(device),
            "CODE_WIDE": self.row.width % 16 == 0,
        }


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
        _permute_kernel[(tokens, cdiv(codes.row.blocks, lines))](
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
        _decode_kernel[(min(work, PROGRAMS_PER_SM * multiprocessors(out_RD.device)),)](
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


# --- what: the torch reference ------------------------------------------------------------------------------


def encode_rows_reference(x_RPN: torch.Tensor, row: CodeRow) -> torch.Tensor:
    """Codes [R, C] of rows [R, P, N], or of rows of one part [R, N]."""
    count, P, N, B = x_RPN.shape[0], row.parts, row.width, row.blocks
    out_RC = torch.zeros(count, row.bytes, dtype=torch.uint8, device=x_RPN.device)
    if count:
        shape = CodeShape(count * P * N, count * P, N)
        coded = encode_reference(x_RPN.reshape(-1), shape).view(count, P, -1)
        out_RC[:, : P * N] = coded[..., :N].flatten(1)
        out_RC[:, P * N : P * (N + B)] = coded[..., B * BLOCK : B * BLOCK + B].flatten(1)
    return out_RC


def decode_rows_reference(codes_RC: torch.Tensor, row: CodeRow, dtype: torch.dtype) -> torch.Tensor:
    """The rows [R, P · N], part after part."""
    count, P, N, B = codes_RC.shape[0], row.parts, row.width, row.blocks
    if not count:
        return torch.empty(0, P * N, dtype=dtype, device=codes_RC.device)
    shape = CodeShape(count * P * N, count * P, N)
    coded = torch.zeros(count, P, shape.row_bytes, dtype=torch.uint8, device=codes_RC.device)
    coded[..., :N] = codes_RC[:, : P * N].view(count, P, N)
    coded[..., B * BLOCK : B * BLOCK + B] = codes_RC[:, P * N : P * (N + B)].view(count, P, B)
    return decode_reference(coded.flatten(0, 1), shape, dtype).view(count, P * N)


def put_reference(codes_VC: torch.Tensor, at_V: torch.Tensor, codes: RowCodes) -> None:
    """Put the codes of the rows `at_V` where they wait."""
    early = at_V < codes.split
    if codes.expected_SC is not None:
        codes.expected_SC[at_V[early]] = codes_VC[early]
    beyond_V, beyond_VC = at_V[~early] - codes.split, codes_VC[~early]
    if codes.pages is not None:
        whole_RC = codes_VC.new_zeros(codes.pages.span.capacity, codes.row.bytes)
        whole_RC[beyond_V] = beyond_VC
        copy_rows(codes.pages, whole_RC, to_pages=True)
    elif codes.excess_RC is not None:
        codes.excess_RC[beyond_V] = beyond_VC


def get_reference(codes: RowCodes, count: int) -> torch.Tensor:
    """The codes [count, C] of the first rows; zeros where pages were refused."""
    parts = [] if codes.expected_SC is None else [codes.expected_SC[:count]]
    left = count - sum(map(len, parts))
    if codes.pages is not None:
        beyond = torch.zeros(
            codes.pages.span.capacity, codes.row.bytes, dtype=torch.uint8, device=codes.pages.book.device
        )
        copy_rows(codes.pages, beyond, to_pages=False)
        parts.append(beyond[:left])
    elif codes.excess_RC is not None:
        parts.append(codes.excess_RC[:left])
    return torch.cat(parts)


# --- how: in Triton -----------------------------------------------------------------------------------------
#
# A tile is one block of a part of several rows, or several blocks of one row: [lines, 128]. `held` is what
# `page_pointers` takes. `within` are its rows in their buffer, or in its pages, int64. N, PARTS and ROW are those
# of `CodeRow`.


@triton.jit
def _places(within, part, block, N: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr):
    """Where in its buffer the codes of each row of a tile begin, and where its scale is."""
    BLOCKS: tl.constexpr = (N + 127) // 128
    first = within * ROW
    return first + part * N + block * 128, first + PARTS * N + part * BLOCKS + block


@triton.jit
def _paged_scale(held, scale_at, inside, like, PAGE: tl.constexpr):
    book, table, _, device_slab, host_slab = held
    slot = scale_at // PAGE
    page = tl.load(book + table + slot, mask=inside, other=0)
    base = page_address(page, device_slab.to(tl.int64), host_slab.to(tl.int64), PAGE)
    return (base + scale_at - slot * PAGE).to(like.dtype)


@triton.jit
def _tile_mask(inside, block, N: tl.constexpr):
    mask = inside[:, None]
    if N % 128 != 0:
        mask = mask & (block * 128 + tl.arange(0, 128) < N)[None, :]
    return mask


@triton.jit
def store_excess(
    code,
    scale,
    excess,
    held,
    granted,
    within,
    inside,
    mask,
    part,
    block,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Write the codes of a tile of excess rows to their pages, if these were granted, or to their buffer."""
    lane = tl.arange(0, 128)
    at, scale_at = _places(within, part, block, N, PARTS, ROW)
    if PAGED:
        if granted:
            tl.store(page_pointers(held, at, lane, inside, excess, PAGE, CODE_WIDE), code, mask=mask)
            tl.store(_paged_scale(held, scale_at, inside, excess, PAGE), scale, mask=inside)
    else:
        tl.store(excess + at[:, None] + lane[None, :], code, mask=mask)
        tl.store(excess + scale_at, scale, mask=inside)


@triton.jit
def store_expected(
    code,
    scale,
    expected,
    within,
    inside,
    mask,
    part,
    block,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Write the codes of a tile of expected rows to their buffer."""
    at, scale_at = _places(within, part, block, N, PARTS, ROW)
    tl.store(expected + at[:, None] + tl.arange(0, 128)[None, :], code, mask=mask)
    tl.store(expected + scale_at, scale, mask=inside)


@triton.jit
def _code_tile(
    x,
    expected,
    excess,
    held,
    granted,
    in_expected,
    within,
    inside,
    part,
    block,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FLOOR: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Code a tile `x` whose rows are either all expected or all in excess."""
    code, scale = code_lines(x.to(tl.float32), FLOOR, FP8)
    mask = _tile_mask(inside, block, N)
    if in_expected:
        store_expected(code, scale, expected, within, inside, mask, part, block, N, PARTS, ROW)
    else:
        store_excess(
            code, scale, excess, held, granted, within, inside, mask, part, block, N, PARTS, ROW, CODE_WIDE, PAGED,
            PAGE,
        )  # fmt: skip


@triton.jit
def code_parts(
    gate,
    linear,
    expected,
    excess,
    held,
    granted,
    in_expected,
    within,
    inside,
    block,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FLOOR: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """`_code_tile` for both parts of rows that have two, else for `gate` alone."""
    _code_tile(
        gate, expected, excess, held, granted, in_expected, within, inside, 0, block, N, PARTS, ROW, FLOOR, FP8,
        CODE_WIDE, PAGED, PAGE,
    )  # fmt: skip
    if PARTS == 2:
        _code_tile(
            linear, expected, excess, held, granted, in_expected, within, inside, 1, block, N, PARTS, ROW, FLOOR,
            FP8, CODE_WIDE, PAGED, PAGE,
        )  # fmt: skip


@triton.jit
def _tile_values(
    expected,
    excess,
    held,
    granted,
    in_expected,
    within,
    inside,
    part,
    block,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The values of such a tile in float32; zeros where it has none, or no pages."""
    lane = tl.arange(0, 128)
    mask = _tile_mask(inside, block, N)
    at, scale_at = _places(within, part, block, N, PARTS, ROW)
    if in_expected:
        code = tl.load(expected + at[:, None] + lane[None, :], mask=mask, other=0)
        scale = tl.load(expected + scale_at, mask=inside, other=0)
    else:
        if PAGED:
            _, _, length, _, _ = held
            there = inside & (at < tl.where(granted, length, 0))
            code_at = page_pointers(held, at, lane, there, excess, PAGE, CODE_WIDE)
            code = tl.load(code_at, mask=_tile_mask(there, block, N), other=0)
            scale = tl.load(_paged_scale(held, scale_at, there, excess, PAGE), mask=there, other=0)
        else:
            code = tl.load(excess + at[:, None] + lane[None, :], mask=mask, other=0)
            scale = tl.load(excess + scale_at, mask=inside, other=0)
    return values_of_lines(code, scale, FP8)


@triton.jit
def part_values(
    expected,
    excess,
    held,
    granted,
    in_expected,
    within,
    inside,
    block,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """`_tile_values` of both parts; of rows that have one, that one twice."""
    gate = _tile_values(
        expected, excess, held, granted, in_expected, within, inside, 0, block, N, PARTS, ROW, FP8, CODE_WIDE,
        PAGED, PAGE,
    )  # fmt: skip
    linear = gate
    if PARTS == 2:
        linear = _tile_values(
            expected, excess, held, granted, in_expected, within, inside, 1, block, N, PARTS, ROW, FP8, CODE_WIDE,
            PAGED, PAGE,
        )  # fmt: skip
    return gate, linear


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
        x = _tile_values(
            expected, excess, held, granted, in_expected, within, inside, 0, block, N, PARTS, ROW, FP8, CODE_WIDE,
            PAGED, PAGE,
        )  # fmt: skip
        target = out + row[:, None] * N + (block * 128 + tl.arange(0, 128))[None, :]
        tl.store(target, x.to(out.dtype.element_ty), mask=_tile_mask(inside, block, N))
        tile += tl.num_programs(0)
