"""Tiles of rows in eight bits: how a kernel writes and reads the codes of `row_codes.py`.

A tile is one block of a part of several rows, or several blocks of one row: [lines, 128]. `held` is what
`page_pointers` takes. `within` are its rows in their buffer, or in its pages, int64. N, PARTS and ROW are those
of `CodeRow`.
"""

from pagestash.kernels.backend import tl, triton
from pagestash.kernels.pages.chunks import page_address
from pagestash.kernels.pages.eight_bits import code_lines, values_of_lines
from pagestash.kernels.pages.paged import page_pointers


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
def tile_mask(inside, block, N: tl.constexpr):
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
    mask = tile_mask(inside, block, N)
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
def tile_values(
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
    mask = tile_mask(inside, block, N)
    at, scale_at = _places(within, part, block, N, PARTS, ROW)
    if in_expected:
        code = tl.load(expected + at[:, None] + lane[None, :], mask=mask, other=0)
        scale = tl.load(expected + scale_at, mask=inside, other=0)
    else:
        if PAGED:
            _, _, length, _, _ = held
            there = inside & (at < tl.where(granted, length, 0))
            code_at = page_pointers(held, at, lane, there, excess, PAGE, CODE_WIDE)
            code = tl.load(code_at, mask=tile_mask(there, block, N), other=0)
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
    """`tile_values` of both parts; of rows that have one, that one twice."""
    gate = tile_values(
        expected, excess, held, granted, in_expected, within, inside, 0, block, N, PARTS, ROW, FP8, CODE_WIDE,
        PAGED, PAGE,
    )  # fmt: skip
    linear = gate
    if PARTS == 2:
        linear = tile_values(
            expected, excess, held, granted, in_expected, within, inside, 1, block, N, PARTS, ROW, FP8, CODE_WIDE,
            PAGED, PAGE,
        )  # fmt: skip
    return gate, linear
