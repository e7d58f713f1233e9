"""RMSNorm as one kernel each way: `y = x · rstd · (weight + offset)`, `rstd = 1/√(mean(x²) + eps)` of each row.

A row is the last dimension, of d elements. Saved for backward: `x` itself and `rstd`, 4 bytes a row. (Written with
torch operators the same norm saves three tensors of x's size, two of them in float32.)

`early` is where models differ. True (Llama and most others): the normalised row is rounded to x's dtype, then
multiplied by the weight; the result has the wider dtype of both. False (Gemma, gpt-oss, our decoder): the product
is in float32 and rounded once, to x's dtype. Gemma's `offset` is 1.

Backward: with n = x·rstd and g = dy·(weight + offset),

    dx = rstd · (g - n · mean(g·n)),    dweight = Σ over rows of dy·n.

Each program sums the weight's gradient over its own rows into a row of `partial`, and one sum over programs
follows: no atomics, so the same input gives the same bits.

What moves, a row in b-byte elements: forward reads b·d and writes b·d + 4; backward reads 2·b·d + 4 and writes b·d.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagestash.kernels.backend import (
    cdiv,
    choose,
    launch,
    multiprocessors,
    power_of_two,
    sum_dtype,
    tl,
    triton,
)
from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.layer.strided_rows import rows_of
from pagestash.kernels.operator import operator

ELEMENTS = 2048
"""Of a tile, over 4 warps: two 16-byte accesses of bf16 a thread. A wider row is a tile by itself."""
PROGRAMS_PER_SM = 4
"""Of backward. Each leaves a row of float32 to be summed: few enough that the sum is cheap."""


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, early: bool, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`y` of x's shape, and `rstd` of one element a row, in the precision of the sums."""
    width = _check(x, weight)
    device = x.device
    if choose(device, backend) == "torch" or not x.numel():
        return forward_reference(x, weight, eps, offset, early)
    rows = rows_of(x, width)
    out = torch.empty(x.shape, dtype=_result_dtype(x, weight, early), device=device)
    rstd = torch.empty(rows.number, dtype=sum_dtype(x.dtype), device=device)
    tile = _tile(width)
    launch(
        _forward_kernel,
        (cdiv(rows.number, tile.together),),
        device,
        rows.at,
        rows.at if weight is None else weight,
        out,
        rstd,
        rows.number,
        rows.apart,
        rows.step,
        TOGETHER=rows.together,
        WIDTH=width,
        EPS=eps,
        OFFSET=offset,
        WEIGHTED=weight is not None,
        EARLY=early,
        ROWS=tile.together,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )
    return out, rstd


def backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    early: bool,
    *,
    need_weight: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `x`, and of `weight` where it is needed."""
    width = _check(x, weight)
    device = x.device
    if choose(device, backend) == "torch" or not x.numel():
        return backward_reference(gradient, x, weight, rstd, offset, early, need_weight=need_weight)
    rows, gradients = rows_of(x, width), rows_of(gradient, width)
    dx = torch.empty(x.shape, dtype=x.dtype, device=device)
    tile = _tile(width)
    programs = min(cdiv(rows.number, tile.together), PROGRAMS_PER_SM * multiprocessors(device))
    partial = rstd.new_empty(programs if need_weight else 0, width)
    launch(
        _backward_kernel,
        (programs,),
        device,
        gradients.at,
        rows.at,
        rows.at if weight is None else weight,
        rstd,
        dx,
        partial,
        rows.number,
        gradients.apart,
        gradients.step,
        rows.apart,
        rows.step,
        GRADIENT_TOGETHER=gradients.together,
        TOGETHER=rows.together,
        WIDTH=width,
        OFFSET=offset,
        WEIGHTED=weight is not None,
        EARLY=early,
        NEED_WEIGHT=need_weight,
        ROWS=tile.together,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )
    if not need_weight or weight is None:
        return dx, None
    return dx, partial.sum(0).to(weight.dtype)


def _check(x: Tensor, weight: Tensor | None) -> int:
    """The elements d of a row."""
    if not x.is_floating_point() or not x.ndim:
        raise ValueError(f"x of shape {tuple(x.shape)} and {x.dtype}: expected floating rows [..., d]")
    width = x.shape[-1]
    if weight is not None and (weight.shape != (width,) or not weight.is_contiguous()):
        raise ValueError(f"weight {tuple(weight.shape)}: expected a contiguous [{width}]")
    return width


class _Tile(NamedTuple):
    together: int
    """Rows of a tile."""
    block: int
    """Columns."""
    warps: int


@cache
def _tile(width: int) -> _Tile:
    block = power_of_two(width)
    return _Tile(max(1, ELEMENTS // block), block, min(16, max(4, block // 1024)))


def _result_dtype(x: Tensor, weight: Tensor | None, early: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if early and weight is not None else x.dtype


# --- what: the torch reference ------------------------------------------------------------------------------


def forward_reference(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, early: bool
) -> tuple[Tensor, Tensor]:
    wide = x.to(sum_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = wide * rstd
    if early:
        normal = normal.to(x.dtype)
    if weight is not None:
        scale = weight if early else weight.to(normal.dtype)
        normal = normal * (scale + offset if offset else scale)
    # A copy where nothing was computed in x's own layout: what the kernel returns is contiguous.
    return normal.to(_result_dtype(x, weight, early)).contiguous(), rstd.reshape(-1)


def backward_reference(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    early: bool,
    *,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    wide = sum_dtype(x.dtype)
    normal = x.to(wide) * rstd.view(*x.shape[:-1], 1)
    of_y = gradient.to(wide)
    of_normal = of_y if weight is None else of_y * (weight.to(wide) + offset)
    mean = (of_normal * normal).mean(-1, keepdim=True)
    dx = (rstd.view(*x.shape[:-1], 1) * (of_normal - normal * mean)).to(x.dtype).contiguous()
    if not need_weight or weight is None:
        return dx, None
    rounded = normal.to(x.dtype).to(wide) if early else normal
    return dx, (of_y * rounded).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


# --- how: the Triton kernels --------------------------------------------------------------------------------


@triton.jit
def _begin(row, apart, step, TOGETHER: tl.constexpr):
    """Where rows begin; see `StridedRows`."""
    return row // TOGETHER * apart + row % TOGETHER * step


@triton.jit
def _forward_kernel(
    x,
    weight,
    out,
    rstd,
    rows,
    apart,
    step,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = row < rows
    mask = inside[:, None] & (column < WIDTH)[None, :]
    begin = _begin(row, apart, step, TOGETHER)
    value = tl.load(x + begin[:, None] + column[None, :], mask=mask, other=0.0)
    value = value.to(rstd.dtype.element_ty)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + EPS)
    tl.store(rstd + row, scale, mask=inside)
    value = value * scale[:, None]
    if EARLY:
        value = value.to(x.dtype.element_ty).to(value.dtype)
    if WEIGHTED:
        by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(value.dtype) + OFFSET
        value = value * by[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    gradient,
    x,
    weight,
    rstd,
    dx,
    partial,
    rows,
    gradient_apart,
    gradient_step,
    apart,
    step,
    GRADIENT_TOGETHER: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EARLY: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDE: tl.constexpr = rstd.dtype.element_ty
    column = tl.arange(0, BLOCK)
    of_weight = tl.zeros((ROWS, BLOCK), WIDE)
    tile = tl.program_id(0).to(tl.int64)
    by = tl.zeros((BLOCK,), WIDE) + 1.0
    if WEIGHTED:
        by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(WIDE) + OFFSET
    while tile * ROWS < rows:
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        mask = inside[:, None] & (column < WIDTH)[None, :]
        begin = _begin(row, apart, step, TOGETHER)
        value = tl.load(x + begin[:, None] + column[None, :], mask=mask, other=0.0).to(WIDE)
        begin = _begin(row, gradient_apart, gradient_step, GRADIENT_TOGETHER)
        of_y = tl.load(gradient + begin[:, None] + column[None, :], mask=mask, other=0.0).to(WIDE)
        scale = tl.load(rstd + row, mask=inside, other=0.0)
        normal = value * scale[:, None]
        of_normal = of_y * by[None, :]
        mean = tl.sum(of_normal * normal, axis=1) / WIDTH
        result = scale[:, None] * (of_normal - normal * mean[:, None])
        at = row[:, None] * WIDTH + column[None, :]
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
        if NEED_WEIGHT:
            if EARLY:
                normal = normal.to(x.dtype.element_ty).to(WIDE)
            of_weight += of_y * normal
        tile += tl.num_programs(0)
    if NEED_WEIGHT:
        at = tl.program_id(0) * WIDTH + column
        tl.store(partial + at, tl.sum(of_weight, axis=0), mask=column < WIDTH)


# --- the operator -------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, early: bool = True
) -> Tensor:
    """RMSNorm of `x` [..., d] by `weight` [d] or without one, differentiable in both; see the file's head."""
    if torch.compiler.is_compiling():
        return _rms_norm(x, weight, eps, offset, early)[0]
    return _RMSNorm.apply(x, weight, (eps, offset, early))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, settings: tuple[float, float, bool]) -> Tensor:
        y, rstd = forward(x, weight, *settings)
        ctx.save_for_backward(x, weight, rstd)
        ctx.settings = settings
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, of_y: Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        need_weight = weight is not None and ctx.needs_input_grad[1]
        _, offset, early = ctx.settings
        return *backward(of_y, x, weight, rstd, offset, early, need_weight=need_weight), None


def _fake(
    x: Tensor, weight: Tensor | None, _eps: float, _offset: float, early: bool
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_result_dtype(x, weight, early))
    return y, x.new_empty(x.numel() // x.shape[-1], dtype=sum_dtype(x.dtype))


_rms_norm = operator(
    "rms_norm", _RMSNorm, "Tensor x, Tensor? weight, float eps, float offset, bool early", _fake, keeps=(0, 1)
)
