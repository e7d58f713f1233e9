"""The kernels of `gated.py`, which says what they compute."""

from pagestash.kernels.backend import tl, triton
from pagestash.kernels.moe.activations import activate
from pagestash.kernels.moe.coded_tiles import code_parts, part_values
from pagestash.kernels.moe.row_info import (
    add_bias,
    aligned,
    row_weight,
    tile_mask,
    tile_rows,
    tiles,
)
from pagestash.kernels.pages.paged import granted_bytes, page_pointers


@triton.jit
def forward_kernel(
    h,
    expected,
    out,
    expected_codes,
    codes,
    split,
    rows,
    weights,
    order,
    bias,
    offsets,
    experts,
    book,
    member,
    table,
    device_slab,
    host_slab,
    N: tl.constexpr,
    STEP: tl.constexpr,  # from one gate to the next
    HALF: tl.constexpr,  # from a gate to its linear part; 0 without a gate
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ORDERED: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0 without a bias
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODED: tl.constexpr,  # then BLOCK is 128
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FLOOR: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
):
    SIZE: tl.constexpr = h.dtype.element_ty.primitive_bitwidth // 8
    WIDTH: tl.constexpr = 2 * N if HALF else N
    count = tl.load(rows).to(tl.int64)
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    COLUMNS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    expected_tiles, all_tiles = tiles(count, split, ROWS, SPLIT)
    tile = tl.program_id(0).to(tl.int64)
    while tile < all_tiles * COLUMNS:
        within, row, inside, in_expected = tile_rows(
            tile // COLUMNS, expected_tiles, count, split, ROWS, SPLIT
        )
        start = tile % COLUMNS * BLOCK
        column = tl.arange(0, BLOCK)
        mask = tile_mask(inside, start + column, N, BLOCK)
        at = within[:, None] * WIDTH + (start + column)[None, :] * STEP
        source = h
        if SPLIT:
            source = tl.where(in_expected, expected, h)
        gate_at = aligned(source + at, WIDE, SPLIT)
        linear_at = aligned(source + at + HALF, WIDE, SPLIT)
        gate = tl.load(gate_at, mask=mask, other=0.0)
        linear = tl.load(linear_at, mask=mask, other=0.0)
        held = (book, table, length, device_slab, host_slab)
        if CODED:
            code_parts(
                gate, linear, expected_codes, codes, held, granted, in_expected, within, inside, start // 128,
                N, PARTS, ROW, FLOOR, FP8, CODE_WIDE, PAGED, PAGE,
            )  # fmt: skip
        elif PAGED:
            if granted & (not in_expected):
                first = (within * WIDTH + start * STEP) * SIZE
                half = first + HALF * SIZE
                gate_at = page_pointers(held, first, column * STEP, inside, h, PAGE, WIDE)
                tl.store(gate_at, gate, mask=mask)
                if HALF:
                    linear_at = page_pointers(held, half, column * STEP, inside, h, PAGE, WIDE)
                    tl.store(linear_at, linear, mask=mask)
        gate = gate.to(tl.float32)
        linear = linear.to(tl.float32)
        if EXPERTS:
            of_row = (start + column) * STEP
            gate = add_bias(gate, bias, offsets, row, of_row, mask, experts, WIDTH, EXPERTS)
            linear = add_bias(linear, bias, offsets, row, of_row + HALF, mask, experts, WIDTH, EXPERTS)
        act, _slope, linear, _passes_gate, _passes_linear = activate(
            gate, linear, HALF != 0, CURVE, SLOPE, LIMIT, SHIFT
        )
        value = act * linear
        if WEIGHTED:
            weight, _at = row_weight(weights, order, row, inside, ORDERED)
            value *= weight[:, None]
        target = out + row[:, None] * N + (start + column)[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)
        tile += tl.num_programs(0)


@triton.jit
def _load_exact(
    gate_at,
    linear_at,
    held,
    granted,
    in_expected,
    first,
    column,
    inside,
    mask,
    h,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gate and linear part of a tile, from its buffer or from pages."""
    SIZE: tl.constexpr = h.dtype.element_ty.primitive_bitwidth // 8
    if PAGED:
        if granted & (not in_expected):
            gate_in = page_pointers(held, first, column * STEP, inside, h, PAGE, WIDE)
            linear_in = page_pointers(held, first + HALF * SIZE, column * STEP, inside, h, PAGE, WIDE)
            gate = tl.load(gate_in, mask=mask, other=0.0)
            linear = tl.load(linear_in, mask=mask, other=0.0)
        else:
            gate = tl.load(gate_at, mask=mask, other=0.0)
            linear = tl.load(linear_at, mask=mask, other=0.0)
    else:
        gate = tl.load(gate_at, mask=mask, other=0.0)
        linear = tl.load(linear_at, mask=mask, other=0.0)
    return gate, linear


@triton.jit
def backward_kernel(
    h,
    expected,
    gradient,
    dh,
    dexpected,
    a,
    dweights,
    split,
    rows,
    weights,
    order,
    bias,
    offsets,
    experts,
    book,
    member,
    table,
    device_slab,
    host_slab,
    N: tl.constexpr,
    STEP: tl.constexpr,  # from one gate to the next
    HALF: tl.constexpr,  # from a gate to its linear part; 0 without a gate
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ORDERED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODED: tl.constexpr,  # then BLOCK is 128
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    FLOOR: tl.constexpr,
    FP8: tl.constexpr,
    CODE_WIDE: tl.constexpr,
):
    SIZE: tl.constexpr = h.dtype.element_ty.primitive_bitwidth // 8
    WIDTH: tl.constexpr = 2 * N if HALF else N
    count = tl.load(rows).to(tl.int64)
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted, length = granted_bytes(book, member)
    expected_tiles, all_tiles = tiles(count, split, ROWS, SPLIT)
    tile = tl.program_id(0).to(tl.int64)
    while tile < all_tiles:
        within, row, inside, in_expected = tile_rows(tile, expected_tiles, count, split, ROWS, SPLIT)
        column = tl.arange(0, BLOCK)
        source = h
        target = dh
        if SPLIT:
            source = tl.where(in_expected, expected, h)
            target = tl.where(in_expected, dexpected, dh)
        weight = tl.zeros((ROWS,), tl.float32) + 1.0
        place = row
        if WEIGHTED:
            weight, place = row_weight(weights, order, row, inside, ORDERED)
        product = tl.zeros((ROWS, BLOCK), tl.float32)
        # One tile has the whole of its rows, so that the weight's gradient is one sum in one order.
        for start in tl.range(0, N, BLOCK):
            mask = tile_mask(inside, start + column, N, BLOCK)
            at = within[:, None] * WIDTH + (start + column)[None, :] * STEP
            narrow = row[:, None] * N + (start + column)[None, :]
            gate_at = aligned(source + at, WIDE, SPLIT)
            linear_at = aligned(source + at + HALF, WIDE, SPLIT)
            held = (book, table, length, device_slab, host_slab)
            if CODED:
                gate, linear = part_values(
                    expected, h, held, granted, in_expected, within, inside, start // 128, N, PARTS, ROW, FP8,
                    CODE_WIDE, PAGED, PAGE,
                )  # fmt: skip
            else:
                first = (within * WIDTH + start * STEP) * SIZE
                gate, linear = _load_exact(
                    gate_at, linear_at, held, granted, in_expected, first, column, inside, mask, h, HALF, STEP,
                    PAGED, PAGE, WIDE,
                )  # fmt: skip
            of_a = tl.load(gradient + narrow, mask=mask, other=0.0).to(tl.float32)
            gate = gate.to(tl.float32)
            linear = linear.to(tl.float32)
            if EXPERTS:
                of_row = (start + column) * STEP
                gate = add_bias(gate, bias, offsets, row, of_row, mask, experts, WIDTH, EXPERTS)
                linear = add_bias(linear, bias, offsets, row, of_row + HALF, mask, experts, WIDTH, EXPERTS)
            act, slope, linear, passes_gate, passes_linear = activate(
                gate, linear, HALF != 0, CURVE, SLOPE, LIMIT, SHIFT
            )
            value = act * linear
            if WEIGHTED:
                product += of_a * value
                value *= weight[:, None]
                of_a *= weight[:, None]
            gate_to = aligned(target + at, WIDE, SPLIT)
            linear_to = aligned(target + at + HALF, WIDE, SPLIT)
            tl.store(gate_to, (of_a * linear * slope * passes_gate).to(dh.dtype.element_ty), mask=mask)
            if HALF:
                tl.store(linear_to, (of_a * act * passes_linear).to(dh.dtype.element_ty), mask=mask)
            tl.store(a + narrow, value.to(a.dtype.element_ty), mask=mask)
        if WEIGHTED:
            tl.store(dweights + place, tl.sum(product, axis=1), mask=inside)
        tile += tl.num_programs(0)
