"""The gated activation between an expert's two projections, with routing weights folded in.

The first projection `h` [rows, 2n] holds the gate in its first n columns and the linear part in the rest.
Forward makes `a = act(gate) · linear · weight` [rows, n]. Backward needs `h` alone: from the gradient of `a`
it makes the gradient of `h`, the weight's gradient, and `a` once more, which the second projection's weight
gradient needs. So neither `a` nor the second projection's output is kept.

With pages, forward writes `h` to them as it reads it, and backward reads them in place: stashing `h` costs
one write. Where the pool had none to give, backward takes `h` from a buffer that the caller filled again.

What moves, a row of bf16: forward 4n read, 2n written (and 4n to pages); backward 6n read, 6n written.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from pagestash.kernels.backend import choose, multiprocessors, tl, triton
from pagestash.kernels.pages.layout import K_BYTES, K_GRANTED, K_HEADER, K_STATUS
from pagestash.kernels.pages.paged import Pages, arguments, copy_rows, is_wide, page_pointers, widest_block

Activation = Literal["silu", "gelu", "clamped"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
CLAMP = 7.0
SLOPE = 1.702
"""gpt-oss: the gate is clamped to 7 from above, the linear part to ±7 and then 1 more; g·sigmoid(1.702 g)."""

ELEMENTS = 2048
"""Of a tile, over 4 warps: two 16-byte accesses a thread for each operand."""
WARPS = 4
PROGRAMS_PER_SM = 8


@dataclass(frozen=True, slots=True)
class RowInfo:
    """What belongs to rows: how many are valid, and the weight and the bias of each.

    `weights` is flat; row r has weight `weights[order[r]]`, or `weights[r]` without an order. `bias` [E, 2n]
    is added to `h` by expert, whose rows end at `offsets`.
    """

    rows: torch.Tensor  # one integer on the device
    weights: torch.Tensor | None = None
    order: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def forward(
    h: torch.Tensor,
    info: RowInfo,
    activation: Activation = "silu",
    pages: Pages | None = None,
    *,
    head: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`a` for the valid rows of `h`; the rows after them stay uninitialised.

    With `head` the rows are in two buffers: those of `head` come first, `h` and its `pages` hold the rest.
    """
    _check(h, activation)
    split = 0 if head is None else head.shape[0]
    out = torch.empty(split + h.shape[0], h.shape[1] // 2, dtype=h.dtype, device=h.device)
    if choose(h.device, backend) == "torch":
        count = int(info.rows)
        if pages is not None:
            copy_rows(pages, h, max(count - split, 0), to_pages=True)
        whole = h if head is None else torch.cat([head, h])
        gate, linear = _biased(whole[:count], info)
        act, _, linear, _, _ = _pieces(gate, linear, activation)
        out[:count] = (act * linear * _row_weights(info, count, act)).to(h.dtype)
    elif out.numel():
        _launch(_forward_kernel, h, head, (h, _or(head, h), out), info, activation, pages)
    return out


def backward(
    h: torch.Tensor,
    gradient: torch.Tensor,
    info: RowInfo,
    activation: Activation = "silu",
    pages: Pages | None = None,
    *,
    head: torch.Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """From the gradient of `a`: the gradient of `h`, `a` itself, and the weights' gradient (float32).

    With `pages` that were granted, `h` is not read. `in_place` writes the first two results over `h` and
    `gradient`. Weights that no valid row refers to get zero. With `head`, as in `forward`, it must be in place,
    and the gradient of the rows in `head` is written over that.
    """
    _check(h, activation)
    if head is not None and not in_place:
        raise ValueError("in_place=False: with a head its gradient has no place of its own")
    dh, a = (h, gradient) if in_place else (torch.empty_like(h), torch.empty_like(gradient))
    dweights = None
    if info.weights is not None:
        dweights = torch.zeros(info.weights.shape, dtype=torch.float32, device=h.device)
    if choose(h.device, backend) == "torch":
        _backward_reference(h, head, gradient, info, activation, pages, dh, a, dweights)
    elif gradient.numel():
        first = _or(head, h)
        _launch(
            _backward_kernel,
            h,
            head,
            (h, first, gradient, dh, _or(head, dh), a, _or(dweights, h)),
            info,
            activation,
            pages,
        )
    return dh, a, dweights


def _check(h: torch.Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if h.ndim != 2 or h.shape[1] % 2 or not h.is_contiguous():
        raise ValueError(f"h of shape {tuple(h.shape)}: expected a contiguous [rows, 2n]")


# --- what: the torch reference ------------------------------------------------------------------------------


def _pieces(gate: torch.Tensor, linear: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, ...]:
    """act(gate), its slope, the linear part, and which gates and linear parts carry a gradient."""
    passes_gate = passes_linear = torch.ones_like(gate)
    if activation == "clamped":
        passes_gate = (gate <= CLAMP).to(gate.dtype)
        passes_linear = (linear.abs() <= CLAMP).to(gate.dtype)
        gate = gate.clamp(max=CLAMP)
        linear = linear.clamp(-CLAMP, CLAMP) + 1
        inner, inner_slope = SLOPE * gate, torch.full_like(gate, SLOPE)
    elif activation == "gelu":
        # 0.5 · (1 + tanh z) is sigmoid(2z).
        inner = 2 * 0.7978845608028654 * (gate + 0.044715 * gate**3)
        inner_slope = 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * gate**2)
    else:
        inner, inner_slope = gate, torch.ones_like(gate)
    sigmoid = torch.sigmoid(inner)
    slope = sigmoid * (1 + gate * (1 - sigmoid) * inner_slope)
    return gate * sigmoid, slope, linear, passes_gate, passes_linear


def _biased(h: torch.Tensor, info: RowInfo) -> tuple[torch.Tensor, torch.Tensor]:
    wide = h if h.dtype == torch.float64 else h.float()
    if info.bias is not None:
        assert info.offsets is not None
        row = torch.arange(h.shape[0], device=h.device, dtype=info.offsets.dtype)
        wide = wide + info.bias[torch.searchsorted(info.offsets, row, right=True)].to(wide.dtype)
    gate, linear = wide.chunk(2, dim=1)
    return gate, linear


def _row_weights(info: RowInfo, count: int, like: torch.Tensor) -> torch.Tensor:
    if info.weights is None:
        return like.new_ones(count, 1)
    flat = info.weights.reshape(-1)
    at = flat[:count] if info.order is None else flat[info.order[:count].to(torch.int64)]
    return at[:, None].to(like.dtype)


def _backward_reference(
    h: torch.Tensor,
    head: torch.Tensor | None,
    gradient: torch.Tensor,
    info: RowInfo,
    activation: Activation,
    pages: Pages | None,
    dh: torch.Tensor,
    a: torch.Tensor,
    dweights: torch.Tensor | None,
) -> None:
    count = int(info.rows)
    split = 0 if head is None else head.shape[0]
    held = h[:count].clone() if head is None else torch.cat([head, h])[:count]
    if pages is not None:
        copy_rows(pages, held[split:], max(count - split, 0), to_pages=False)
    gate, linear = _biased(held, info)
    act, slope, linear, passes_gate, passes_linear = _pieces(gate, linear, activation)
    weight = _row_weights(info, count, act)
    of_a = gradient[:count].to(act.dtype)
    of_product = of_a * weight
    if dweights is not None:
        value = (of_a * act * linear).sum(1).float()
        at = slice(count) if info.order is None else info.order[:count].to(torch.int64)
        dweights.view(-1)[at] = value
    of_h = torch.cat([of_product * linear * slope * passes_gate, of_product * act * passes_linear], dim=1).to(
        h.dtype
    )
    if head is not None:
        head[:count] = of_h[:split]
    dh[: max(count - split, 0)] = of_h[split:]
    a[:count] = (act * linear * weight).to(h.dtype)


# --- how: the Triton kernels --------------------------------------------------------------------------------


@triton.jit
def _activate(gate, linear, ACT: tl.constexpr):
    passes_gate = 1.0
    passes_linear = 1.0
    inner_slope = 1.0
    inner = gate
    if ACT == 2:
        passes_gate = tl.where(gate <= 7.0, 1.0, 0.0)
        passes_linear = tl.where(tl.abs(linear) <= 7.0, 1.0, 0.0)
        gate = tl.minimum(gate, 7.0)
        linear = tl.minimum(tl.maximum(linear, -7.0), 7.0) + 1.0
        inner = 1.702 * gate
        inner_slope = 1.702
    elif ACT == 1:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    sigmoid = tl.sigmoid(inner)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid) * inner_slope)
    return gate * sigmoid, slope, linear, passes_gate, passes_linear


@triton.jit
def _row_weight(weights, order, row, inside, ORDERED: tl.constexpr):
    """The weights of rows, and where in `weights` they stand."""
    at = row
    if ORDERED:
        at = tl.load(order + row, mask=inside, other=0).to(tl.int64)
    return tl.load(weights + at, mask=inside, other=0.0).to(tl.float32), at


@triton.jit
def _add_bias(
    value,
    bias,
    offsets,
    row,
    column,
    mask,
    experts,
    N: tl.constexpr,
    EXPERTS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Add the bias of the expert each row belongs to: as many experts end at or before the row."""
    each = tl.arange(0, EXPERTS)
    end = tl.load(offsets + each, mask=each < experts, other=2147483647)
    expert = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1).to(tl.int64)
    at = expert[:, None] * (2 * N) + HALF * N + column[None, :]
    return value + tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tiles(count, split, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Tiles of rows in the head, and in all; none has rows of both buffers."""
    in_head = tl.zeros((), tl.int64)
    if SPLIT:
        in_head = tl.minimum(count, split)
    head_tiles = (in_head + ROWS - 1) // ROWS
    return head_tiles, head_tiles + (count - in_head + ROWS - 1) // ROWS


@triton.jit
def _tile_rows(tile, head_tiles, count, split, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """The rows of a tile in its buffer and among all, which are valid, and whether the buffer is the head."""
    in_head = tile < head_tiles  # of which there are none without a head
    before = tl.zeros((), tl.int64)
    end = count
    if SPLIT:
        tile = tl.where(in_head, tile, tile - head_tiles)
        before = tl.where(in_head, 0, split).to(tl.int64)
        end = tl.where(in_head, tl.minimum(count, split), count)
    within = tile * ROWS + tl.arange(0, ROWS)
    row = before + within
    return within, row, row < end, in_head


@triton.jit
def _aligned(pointer, WIDE: tl.constexpr, SPLIT: tl.constexpr):
    """What the compiler no longer sees of a pointer that was chosen among two: rows begin at 16 bytes."""
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    if SPLIT:
        if WIDE:
            pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16 // SIZE))
    return pointer


@triton.jit
def _forward_kernel(
    h,
    head,
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
    ACT: tl.constexpr,
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
    count = tl.load(rows).to(tl.int64)
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted = tl.load(book + member * K_HEADER + K_STATUS) == K_GRANTED
        length = tl.load(book + member * K_HEADER + K_BYTES)
    COLUMNS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    head_tiles, tiles = _tiles(count, split, ROWS, SPLIT)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles * COLUMNS:
        within, row, inside, in_head = _tile_rows(tile // COLUMNS, head_tiles, count, split, ROWS, SPLIT)
        start = tile % COLUMNS * BLOCK
        column = tl.arange(0, BLOCK)
        mask = inside[:, None]
        if N % BLOCK != 0:
            mask = mask & (start + column < N)[None, :]
        at = within[:, None] * (2 * N) + (start + column)[None, :]
        source = h
        if SPLIT:
            source = tl.where(in_head, head, h)
        gate_at = _aligned(source + at, WIDE, SPLIT)
        linear_at = _aligned(source + at + N, WIDE, SPLIT)
        gate = tl.load(gate_at, mask=mask, other=0.0)
        linear = tl.load(linear_at, mask=mask, other=0.0)
        if PAGED:
            if granted & (not in_head):
                held = (book, table, length, device_slab, host_slab)
                first = (within * (2 * N) + start) * SIZE
                half = first + N * SIZE
                gate_at = page_pointers(held, first, column, inside, h, PAGE, WIDE)
                tl.store(gate_at, gate, mask=mask)
                linear_at = page_pointers(held, half, column, inside, h, PAGE, WIDE)
                tl.store(linear_at, linear, mask=mask)
        gate = gate.to(tl.float32)
        linear = linear.to(tl.float32)
        if EXPERTS:
            gate = _add_bias(gate, bias, offsets, row, start + column, mask, experts, N, EXPERTS, 0)
            linear = _add_bias(linear, bias, offsets, row, start + column, mask, experts, N, EXPERTS, 1)
        act, _slope, linear, _passes_gate, _passes_linear = _activate(gate, linear, ACT)
        value = act * linear
        if WEIGHTED:
            weight, _at = _row_weight(weights, order, row, inside, ORDERED)
            value *= weight[:, None]
        target = out + row[:, None] * N + (start + column)[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)
        tile += tl.num_programs(0)


@triton.jit
def _backward_kernel(
    h,
    head,
    gradient,
    dh,
    dhead,
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
    ACT: tl.constexpr,
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
    SIZE: tl.constexpr = h.dtype.element_ty.primitive_bitwidth // 8
    count = tl.load(rows).to(tl.int64)
    granted = False
    length = tl.zeros((), tl.int64)
    if PAGED:
        granted = tl.load(book + member * K_HEADER + K_STATUS) == K_GRANTED
        length = tl.load(book + member * K_HEADER + K_BYTES)
    head_tiles, tiles = _tiles(count, split, ROWS, SPLIT)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        within, row, inside, in_head = _tile_rows(tile, head_tiles, count, split, ROWS, SPLIT)
        column = tl.arange(0, BLOCK)
        source = h
        target = dh
        if SPLIT:
            source = tl.where(in_head, head, h)
            target = tl.where(in_head, dhead, dh)
        weight = tl.zeros((ROWS,), tl.float32) + 1.0
        place = row
        if WEIGHTED:
            weight, place = _row_weight(weights, order, row, inside, ORDERED)
        product = tl.zeros((ROWS, BLOCK), tl.float32)
        # One tile has the whole of its rows, so that the weight's gradient is one sum in one order.
        for start in tl.range(0, N, BLOCK):
            mask = inside[:, None]
            if N % BLOCK != 0:
                mask = mask & (start + column < N)[None, :]
            at = within[:, None] * (2 * N) + (start + column)[None, :]
            narrow = row[:, None] * N + (start + column)[None, :]
            gate_at = _aligned(source + at, WIDE, SPLIT)
            linear_at = _aligned(source + at + N, WIDE, SPLIT)
            if PAGED:
                if granted & (not in_head):
                    held = (book, table, length, device_slab, host_slab)
                    first = (within * (2 * N) + start) * SIZE
                    half = first + N * SIZE
                    gate_in = page_pointers(held, first, column, inside, h, PAGE, WIDE)
                    linear_in = page_pointers(held, half, column, inside, h, PAGE, WIDE)
                    gate = tl.load(gate_in, mask=mask, other=0.0)
                    linear = tl.load(linear_in, mask=mask, other=0.0)
                else:
                    gate = tl.load(gate_at, mask=mask, other=0.0)
                    linear = tl.load(linear_at, mask=mask, other=0.0)
            else:
                gate = tl.load(gate_at, mask=mask, other=0.0)
                linear = tl.load(linear_at, mask=mask, other=0.0)
            of_a = tl.load(gradient + narrow, mask=mask, other=0.0).to(tl.float32)
            gate = gate.to(tl.float32)
            linear = linear.to(tl.float32)
            if EXPERTS:
                gate = _add_bias(gate, bias, offsets, row, start + column, mask, experts, N, EXPERTS, 0)
                linear = _add_bias(linear, bias, offsets, row, start + column, mask, experts, N, EXPERTS, 1)
            act, slope, linear, passes_gate, passes_linear = _activate(gate, linear, ACT)
            value = act * linear
            if WEIGHTED:
                product += of_a * value
                value *= weight[:, None]
                of_a *= weight[:, None]
            gate_to = _aligned(target + at, WIDE, SPLIT)
            linear_to = _aligned(target + at + N, WIDE, SPLIT)
            tl.store(gate_to, (of_a * linear * slope * passes_gate).to(dh.dtype.element_ty), mask=mask)
            tl.store(linear_to, (of_a * act * passes_linear).to(dh.dtype.element_ty), mask=mask)
            tl.store(a + narrow, value.to(a.dtype.element_ty), mask=mask)
        if WEIGHTED:
            tl.store(dweights + place, tl.sum(product, axis=1), mask=inside)
        tile += tl.num_programs(0)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer for a kernel that will not follow it."""
    return other if tensor is None else tensor


def _launch(
    kernel: Any,
    h: torch.Tensor,
    head: torch.Tensor | None,
    operands: tuple[torch.Tensor, ...],
    info: RowInfo,
    activation: Activation,
    pages: Pages | None,
) -> None:
    width, size = h.shape[1] // 2, h.element_size()
    block = widest_block(width, 256, size, pages)
    together = max(1, ELEMENTS // block)
    split = 0 if head is None else head.shape[0]
    work = -(-h.shape[0] // together) - (-split // together)
    if kernel is _forward_kernel:
        work *= -(-width // block)
    kernel[(max(1, min(work, PROGRAMS_PER_SM * multiprocessors(h.device))),)](
        *operands,
        split,
        info.rows,
        _or(info.weights, h),
        _or(info.order, h),
        _or(info.bias, h),
        _or(info.offsets, h),
        0 if info.bias is None else info.bias.shape[0],
        *arguments(pages, h),
        N=width,
        ACT=ACTIVATIONS.index(activation),
        WEIGHTED=info.weights is not None,
        ORDERED=info.order is not None,
        EXPERTS=0 if info.bias is None else triton.next_power_of_2(info.bias.shape[0]),
        PAGED=pages is not None,
        PAGE=65536 if pages is None else pages.memory.page_bytes,
        WIDE=is_wide(width, block, size),
        SPLIT=split > 0,
        ROWS=together,
        BLOCK=block,
        num_warps=WARPS,
    )
