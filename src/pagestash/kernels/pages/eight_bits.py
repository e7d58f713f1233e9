"""Code values of 16 or 32 bits in 8, and back: FP8 e4m3 with a power of two for every 128 values.

A buffer has R rows of D values. Coded, it has R rows of `row_bytes`: B = ceil(D / 128) blocks of 128 bytes, then B
bytes of scales, padded to 16. So a row's scales travel with it, and the valid rows are the first bytes, as ever. A
tensor without rows is cut into rows of 2048 values.

Let a be the largest finite value of a block, 2^e <= a < 2^(e+1). The block's scale is 2^k, k = max(e - 7, floor).
The code of x is x / 2^k, rounded to nearest even, and at most ±240. Nothing else rounds: a scale is a power of two,
and every code times its scale is a value of the dtype. So for every finite x, with x' what comes back,

    |x - x'|  <=  max(|x| / 16, 2^(k - 10)),        where 2^(k - 10) <= a / 2^17 unless k is the floor.

The floor is -15 for float16, whose smallest value is then the smallest code, and -100 for the others, where
2^(k - 10) is 2^-110. (e4m3 goes to 448. With ±240 the bound still holds, since a value from 240 to 256 is off by
less than a sixteenth, and a value near the dtype's end does not become infinite.)

The codes 0x7E and 0xFE, e4m3's ±448, mean ±infinity here; 0x7F and 0xFF are NaN. A value that is not finite comes
back as it was, and changes no other value of its block.

What moves: 2 bytes in and 1.01 out for a value of 16 bits, or the reverse. Pages are written and read in place.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pagestash.kernels.backend import Backend, cdiv, interpreted, launch, multiprocessors, tl, triton
from pagestash.kernels.pages.chunks import page_address
from pagestash.kernels.pages.layout import HEADER, Header
from pagestash.kernels.pages.paged import Pages, arguments, copy_rows, granted_bytes, page_pointers

BLOCK = 128
WIDTH = 2048
"""Values in a row of a tensor that has no rows."""
LINES = 64
"""Blocks of one program."""
WARPS = 8
PROGRAMS_PER_SM = 32
"""Where the device knows how many rows are valid: a buffer may have room for several times as many."""
FLOOR = {torch.float16: -15, torch.bfloat16: -100, torch.float32: -100}
"""The dtypes that can be coded, and their smallest k."""


@dataclass(frozen=True, slots=True)
class CodeShape:
    """How the values of one tensor are coded: `rows` of `width` values, of which the last may be cut short."""

    values: int
    rows: int
    width: int

    @classmethod
    def of(cls, values: int, rows: int = 0) -> "CodeShape":
        """`values` in so many rows; 0: the tensor has no rows of its own."""
        if rows:
            return cls(values, rows, values // rows)
        width = min(values, WIDTH)
        return cls(values, cdiv(values, width) if values else 0, width)

    @property
    def blocks(self) -> int:
        """Of one row."""
        return cdiv(self.width, BLOCK)

    @property
    def row_bytes(self) -> int:
        return self.blocks * BLOCK + cdiv(self.blocks, 16) * 16

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


def encode(
    values: torch.Tensor,
    shape: CodeShape,
    to: torch.Tensor | Pages,
    backend: Backend,
    valid: torch.Tensor | None = None,
    *,
    tail: bool = True,
) -> None:
    """Code the rows of `values` (flat) into a uint8 buffer [rows, row bytes], or into pages.

    `valid` is a device integer: the rows from there on are not read, and coded as zeros, or not at all without
    `tail`. Pages know it themselves: they have no such rows.
    """
    if not shape.values:
        return
    if backend == "triton":
        tail = tail and not isinstance(to, Pages)
        _launch(_encode_kernel, values, shape, to, valid, tail=tail, FLOOR=FLOOR[values.dtype])
        return
    codes = encode_reference(values, shape)
    if isinstance(to, Pages):
        copy_rows(to, codes, to_pages=True)
    else:
        count = _valid_rows(to, shape, valid)
        to[:count] = codes[:count]
        if tail:
            to[count:] = 0


def decode(
    of: torch.Tensor | Pages,
    shape: CodeShape,
    values: torch.Tensor,
    backend: Backend,
    valid: torch.Tensor | None = None,
    *,
    tail: bool = True,
) -> None:
    """The values of coded rows into `values` (flat). Those whose pages were refused become zero.

    So do the rows that are not valid; without `tail` they are left as they are.
    """
    if not shape.values:
        return
    if backend == "triton":
        _launch(_decode_kernel, values, shape, of, valid, tail=tail)
        return
    codes = of
    if isinstance(of, Pages):
        codes = torch.zeros(shape.rows, shape.row_bytes, dtype=torch.uint8, device=values.device)
        copy_rows(of, codes, to_pages=False)
    assert isinstance(codes, torch.Tensor)
    count = _valid_rows(of, shape, valid) * shape.width
    found = decode_reference(codes, shape, values.dtype)
    values[:count] = found[:count]
    if tail:
        values[count:] = 0


def _valid_rows(where: torch.Tensor | Pages, shape: CodeShape, valid: torch.Tensor | None) -> int:
    """Waits for the device."""
    if isinstance(where, Pages):
        return int(where.book[where.member * HEADER + Header.BYTES]) // shape.row_bytes
    return shape.rows if valid is None else min(max(int(valid), 0), shape.rows)


# --- what: the torch reference ------------------------------------------------------------------------------


def encode_reference(values: torch.Tensor, shape: CodeShape) -> torch.Tensor:
    """Rows [rows, row bytes] of codes and scales."""
    R, D, B = shape.rows, shape.width, shape.blocks
    x_RD = torch.zeros(R * D, dtype=torch.float32, device=values.device)
    x_RD[: values.numel()] = values
    x = torch.zeros(R, B * BLOCK, dtype=torch.float32, device=values.device)
    x[:, :D] = x_RD.view(R, D)
    x = x.view(R, B, BLOCK)
    finite = x.isfinite()
    largest = torch.where(finite, x.abs(), 0).amax(-1, keepdim=True)
    k = ((largest.view(torch.int32) >> 23) - 127 - 7).clamp(min=FLOOR[values.dtype])
    scaled = (torch.where(finite, x, 0) * ((127 - k) << 23).view(torch.float32)).clamp(-240, 240)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    beyond = torch.where(x.isnan(), 0x7F, torch.where(x > 0, 0x7E, 0xFE)).to(torch.uint8)
    out = torch.zeros(R, shape.row_bytes, dtype=torch.uint8, device=values.device)
    out[:, : B * BLOCK] = torch.where(finite, codes, beyond).view(R, -1)
    out[:, B * BLOCK : B * BLOCK + B] = (k + 127).to(torch.uint8).view(R, B)
    return out


def decode_reference(codes: torch.Tensor, shape: CodeShape, dtype: torch.dtype) -> torch.Tensor:
    """The values, flat."""
    R, D, B = shape.rows, shape.width, shape.blocks
    v = codes[:, : B * BLOCK].contiguous().view(torch.float8_e4m3fn).view(R, B, BLOCK).float()
    scale = (codes[:, B * BLOCK : B * BLOCK + B].int() << 23).view(torch.float32).view(R, B, 1)
    x = v * torch.where(v.abs() > 256, torch.inf, scale)
    return x.view(R, -1)[:, :D].reshape(-1)[: shape.values].to(dtype)


# --- how: the Triton kernels --------------------------------------------------------------------------------
#
# A line is a block of 128 values; a program has L at a time. EVEN says that every block is full. FP8 says that the
# device converts e4m3 itself; else integer operations do, with the same results.


@triton.jit
def _round_to_code(x, FP8: tl.constexpr):
    """The code of |x| <= 240, with the sign of x: e4m3, to nearest even."""
    if FP8:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        # Subnormal codes stand in the same steps as those of 2^-6 on.
        exponent = tl.maximum(bits & 0x7F800000, 121 << 23)
        # 2^20 times the power of two at or below |x|: the sum has three bits of mantissa left for x, and rounds.
        large = exponent + (20 << 23)
        steps = (tl.abs(x) + large.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - large
        magnitude = steps + ((exponent - (121 << 23)) >> 20)
        code = (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def _of_code(code, FP8: tl.constexpr):
    """The value of a code in float32."""
    if FP8:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        magnitude = code.to(tl.int32) & 0x7F
        small = magnitude < 8
        bits = (magnitude << 20) + tl.where(small, 121 << 23, 120 << 23)
        positive = bits.to(tl.float32, bitcast=True) - tl.where(small, 0.015625, 0.0)
        positive = tl.where(magnitude == 0x7F, float("nan"), positive)
        sign = (code.to(tl.int32) & 0x80) << 24
        value = (positive.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _code_lines(x, FLOOR: tl.constexpr, FP8: tl.constexpr):
    """The codes of lines [L, 128] in float32, zeros where there is no value, and the scale of each line."""
    finite = tl.abs(x) < float("inf")
    largest = tl.max(tl.where(finite, tl.abs(x), 0.0), 1)
    k = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 134, FLOOR)
    scaled = x * ((127 - k) << 23).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -240.0), 240.0)
    if FP8:
        # The conversion takes infinity to 448, and NaN to NaN. (Bytes that are chosen one by one cost more.)
        beyond = tl.where(x != x, tl.abs(x), x)
        code = _round_to_code(tl.where(finite, scaled, beyond), FP8)
    else:
        beyond = tl.where(x != x, 0x7F, tl.where(x > 0, 0x7E, 0xFE)).to(tl.uint8)
        code = tl.where(finite, _round_to_code(scaled, FP8), beyond)
    return code, (k + 127).to(tl.uint8)


@triton.jit
def _values_of_lines(code, scale, FP8: tl.constexpr):
    """The values of coded lines [L, 128] in float32, exactly; codes and scales of 0 are zeros."""
    v = _of_code(code, FP8)
    power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return v * tl.where(tl.abs(v) > 256.0, float("inf"), power[:, None])


@triton.jit
def _valid_of(rows, row_bytes, valid, length, ROWS_ON_DEVICE: tl.constexpr, PAGED: tl.constexpr):
    """How many rows are valid."""
    count = tl.zeros((), tl.int64) + rows
    if PAGED:
        count = length // row_bytes
    if ROWS_ON_DEVICE:
        count = tl.minimum(count, tl.maximum(tl.load(valid).to(tl.int64), 0))
    return count.to(tl.int32)


@triton.jit
def _lines(first, values, rows, width, blocks, EVEN: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr):
    """Of L lines: row, block in the row, which there are, where their values are, and which there are."""
    line = first + tl.arange(0, L)
    row = line // blocks
    block = line - row * blocks
    inside = row < rows
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * width + column
    there = inside[:, None] & (column >= 0)
    if not EVEN:
        there = there & (column < width) & (at < values)
    return row, block, inside, at, there


@triton.jit
def _code_pointers(
    codes,
    held,
    row,
    block,
    used,
    blocks,
    row_bytes,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pointers to the codes of each line, and to its scale."""
    first = row.to(tl.int64) * row_bytes
    start = first + block * BLOCK
    scale_at = first + blocks * BLOCK + block
    lane = tl.arange(0, BLOCK)
    if PAGED:
        book, table, _, device_slab, host_slab = held
        code = page_pointers(held, start, lane, used, codes, PAGE, True)
        slot = scale_at // PAGE
        page = tl.load(book + table + slot, mask=used, other=0)
        base = page_address(page, device_slab.to(tl.int64), host_slab.to(tl.int64), PAGE)
        scale = (base + scale_at - slot * PAGE).to(codes.dtype)
    else:
        code = codes + tl.multiple_of(start, 16)[:, None] + lane[None, :]
        scale = codes + scale_at
    return code, scale


@triton.jit
def _encode_kernel(
    values,
    codes,
    book,
    member,
    table,
    device_slab,
    host_slab,
    values_count,
    rows,
    width,
    blocks,
    row_bytes,
    valid,
    FLOOR: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
    FP8: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    count = _valid_of(rows, row_bytes, valid, length, ROWS_ON_DEVICE, PAGED)
    coded = count
    if PAGED:
        coded = tl.where(granted, count, 0)
    held = (book, table, length, device_slab, host_slab)
    first = tl.program_id(0) * L
    while first < (rows if TAIL else count) * blocks:
        row, block, inside, at, there = _lines(first, values_count, rows, width, blocks, EVEN, L, BLOCK)
        used = inside & (row < coded)
        x = tl.load(values + at, mask=there & used[:, None], other=0.0).to(tl.float32)
        code, scale = _code_lines(x, FLOOR, FP8)
        code_at, scale_at = _code_pointers(
            codes, held, row, block, used, blocks, row_bytes, PAGED, PAGE, BLOCK
        )
        if TAIL:
            used = inside  # rows that are not valid were read as zeros
        tl.store(code_at, code, mask=used[:, None])
        tl.store(scale_at, scale, mask=used)
        first += tl.num_programs(0) * L


@triton.jit
def _decode_kernel(
    values,
    codes,
    book,
    member,
    table,
    device_slab,
    host_slab,
    values_count,
    rows,
    width,
    blocks,
    row_bytes,
    valid,
    ROWS_ON_DEVICE: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
    FP8: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    count = _valid_of(rows, row_bytes, valid, length, ROWS_ON_DEVICE, PAGED)
    coded = count
    if PAGED:
        coded = tl.where(granted, count, 0)
    held = (book, table, length, device_slab, host_slab)
    first = tl.program_id(0) * L
    while first < (rows if TAIL else count) * blocks:
        row, block, inside, at, there = _lines(first, values_count, rows, width, blocks, EVEN, L, BLOCK)
        used = inside & (row < coded)
        code_at, scale_at = _code_pointers(
            codes, held, row, block, used, blocks, row_bytes, PAGED, PAGE, BLOCK
        )
        code = tl.load(code_at, mask=used[:, None], other=0)
        x = _values_of_lines(code, tl.load(scale_at, mask=used, other=0), FP8)
        if not TAIL:
            there = there & (row < count)[:, None]
        tl.store(values + at, x.to(values.dtype.element_ty), mask=there)
        first += tl.num_programs(0) * L


def _launch(
    kernel: Any,
    values: torch.Tensor,
    shape: CodeShape,
    codes: torch.Tensor | Pages,
    valid: torch.Tensor | None,
    *,
    tail: bool,
    **options: Any,
) -> None:
    pages = codes if isinstance(codes, Pages) else None
    flat = codes.memory.device_slab if isinstance(codes, Pages) else codes
    programs = cdiv(shape.rows * shape.blocks, LINES)
    if not tail:
        programs = min(programs, PROGRAMS_PER_SM * multiprocessors(values.device))
    launch(
        kernel,
        (programs,),
        values.device,
        values,
        flat,
        *arguments(pages, flat),
        shape.values,
        shape.rows,
        shape.width,
        shape.blocks,
        shape.row_bytes,
        values if valid is None else valid,
        **options,
        ROWS_ON_DEVICE=valid is not None,
        TAIL=tail,
        EVEN=shape.width % BLOCK == 0 and shape.values == shape.rows * shape.width,
        FP8=converts(values.device),
        PAGED=pages is not None,
        PAGE=16 if pages is None else pages.memory.page_bytes,
        L=LINES,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@cache
def converts(device: torch.device) -> bool:
    """Whether the device has instructions for e4m3. (Triton's interpreter truncates where they round.)"""
    return not interpreted() and torch.cuda.get_device_capability(device) >= (8, 9)
