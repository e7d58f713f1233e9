"""The kernels of `gated.py`, which says what they compute."""

from pagestash.kernels.backend import tl, triton
from pagestash.kernels.moe.activations import activate
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
def pair_words(pointer):
    """Pairs of gate and linear part as single elements: every second value by itself takes twice the accesses."""
    if pointer.dtype.element_ty.primitive_bitwidth == 16:
        words = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        words = pointer.to(tl.pointer_type(tl.int64), bitcast=True)
    return words


@triton.jit
def unpair(words, like):
    """The first and the second value of each pair."""
    TYPE: tl.constexpr = like.dtype.element_ty
    if TYPE.primitive_bitwidth == 16:
        first = words.to(tl.int16).to(TYPE, bitcast=True)
        second = (words >> 16).to(tl.int16).to(TYPE, bitcast=True)
    else:
        first = words.to(tl.int32).to(TYPE, bitcast=True)
        second = (words >> 32).to(tl.int32).to(TYPE, bitcast=True)
    return first, second


@triton.jit
def paired(first, second):
    if first.dtype.primitive_bitwidth == 16:
        low = first.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        words = low | (second.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    return words


@triton.jit
def forward_kernel(
    h,
    expected,
    out,
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
        source = h
        if SPLIT:
            source = tl.where(in_expected, expected, h)
        held = (book, table, length, device_slab, host_slab)
        if STEP == 2:
            words = pair_words(source)
            both = tl.load(
                aligned(words + within[:, None] * N + (start + column)[None, :], WIDE, SPLIT),
                mask=mask,
                other=0,
            )
            gate, linear = unpair(both, h)
        else:
            at = source + within[:, None] * WIDTH + (start + column)[None, :]
            gate = tl.load(aligned(at, WIDE, SPLIT), mask=mask, other=0.0)
            linear = tl.load(aligned(at + HALF, WIDE, SPLIT), mask=mask, other=0.0)
        if PAGED:
            if granted & (not in_expected):
                first = (within * WIDTH + start * STEP) * SIZE
                if STEP == 2:
                    tl.store(
                        page_pointers(held, first, column, inside, pair_words(h), PAGE, WIDE), both, mask=mask
                    )
                else:
                    tl.store(page_pointers(held, first, column, inside, h, PAGE, WIDE), gate, mask=mask)
                    if HALF:
                        half = first + HALF * SIZE
                        tl.store(page_pointers(held, half, column, inside, h, PAGE, WIDE), linear, mask=mask)
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
def _load_tile(
    at,
    held,
    from_pages,
    first,
    column,
    inside,
    mask,
    h,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
):
    if PAGED:
        if from_pages:
            value = tl.load(page_pointers(held, first, column, inside, h, PAGE, WIDE), mask=mask, other=0)
        else:
            value = tl.load(at, mask=mask, other=0)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


@triton.jit
def _load_parts(
    source,
    held,
    from_pages,
    within,
    start,
    inside,
    mask,
    h,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate and linear part of a tile, from its buffer or from pages."""
    SIZE: tl.constexpr = h.dtype.element_ty.primitive_bitwidth // 8
    column = tl.arange(0, BLOCK)
    at = within[:, None] * (WIDTH // STEP) + (start + column)[None, :]
    first = (within * WIDTH + start * STEP) * SIZE
    if STEP == 2:
        at = aligned(pair_words(source) + at, WIDE, SPLIT)
        both = _load_tile(at, held, from_pages, first, column, inside, mask, pair_words(h), PAGED, PAGE, WIDE)
        gate, linear = unpair(both, h)
    else:
        other = first + HALF * SIZE
        gate_at = aligned(source + at, WIDE, SPLIT)
        linear_at = aligned(source + at + HALF, WIDE, SPLIT)
        gate = _load_tile(gate_at, held, from_pages, first, column, inside, mask, h, PAGED, PAGE, WIDE)
        linear = _load_tile(linear_at, held, from_pages, other, column, inside, mask, h, PAGED, PAGE, WIDE)
    return gate, linear


@triton.jit
def _store_parts(
    target,
    dgate,
    dlinear,
    within,
    start,
    mask,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = within[:, None] * (WIDTH // STEP) + (start + tl.arange(0, BLOCK))[None, :]
    if STEP == 2:
        tl.store(aligned(pair_words(target) + at, WIDE, SPLIT), paired(dgate, dlinear), mask=mask)
    else:
        tl.store(aligned(target + at, WIDE, SPLIT), dgate, mask=mask)
        if HALF:
            tl.store(aligned(target + at + HALF, WIDE, SPLIT), dlinear, mask=mask)


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
):
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
            narrow = row[:, None] * N + (start + column)[None, :]
            held = (book, table, length, device_slab, host_slab)
            gate, linear = _load_parts(
                source, held, granted & (not in_expected), within, start, inside, mask, h, WIDTH, HALF, STEP,
                PAGED, PAGE, WIDE, SPLIT, BLOCK,
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
            dgate = (of_a * linear * slope * passes_gate).to(dh.dtype.element_ty)
            dlinear = (of_a * act * passes_linear).to(dh.dtype.element_ty)
            _store_parts(target, dgate, dlinear, within, start, mask, WIDTH, HALF, STEP, WIDE, SPLIT, BLOCK)
            tl.store(a + narrow, value.to(a.dtype.element_ty), mask=mask)
        if WEIGHTED:
            tl.store(dweights + place, tl.sum(product, axis=1), mask=inside)
        tile += tl.num_programs(0)
