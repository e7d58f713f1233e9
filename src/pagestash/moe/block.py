"""The expert block: rows in expert order through both projections, and back.

Shapes: T tokens, K choices each, R rows of capacity, E experts here, d the model's width, n an expert's.
`up` [E, 2n, d] and `down` [E, d, n] are the projections (gate first, then linear), `h` [R, 2n] the first
one's result, `a` [R, n] the activation with the routing weight in it.

Two autograd functions share one body. `LocalExperts` takes tokens, gathers them itself and keeps the tokens
and `h`: `2·T·d + 4·T·K·n` bytes in bf16. `ReceivedExperts` takes rows that came over a wire and keeps those
and `h`. Each of the two has a `Place`. With a pool, `h` goes to pages from inside the activation kernel; it is
expendable: where the pool has none to give, backward makes it again by a product whose offsets are zero unless
the pages are missing. Under recompute the same product makes all of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from pagestash.kernels import swiglu
from pagestash.kernels.gather import combine, spread
from pagestash.kernels.route import multihot
from pagestash.kernels.swiglu import Activation, RowInfo
from pagestash.moe.grouped import grouped_mm
from pagestash.moe.lease import Lease, graph_is_kept
from pagestash.pages.pool import PagePool
from pagestash.saved.region import claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor waits for backward: in pages, where autograd saves it, or nowhere."""

    pool: PagePool | None = None
    account: int = 0
    again: bool = False
    """Whether backward makes it again, so that nothing waits."""
    module: nn.Module | None = None
    """Whose rule gives what autograd saves a home; None: that of the region we are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """What a block needs to know besides its tensors."""

    activation: Activation = "silu"
    rows: Place = Place()
    h: Place = Place()
    kept: bool = True
    """Whether a backward may follow; without one, nothing is put into pages."""


@dataclass(slots=True)
class _Kept:
    """What backward finds: `h` itself, the lease of its pages, or neither, where it makes `h` again."""

    h: torch.Tensor | None
    lease: Lease | None


def _through(
    x_RD: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    info: RowInfo,
    offsets: torch.Tensor,
    options: BlockOptions,
) -> tuple[torch.Tensor, _Kept]:
    """Both projections and the activation between them; and what to keep."""
    h = grouped_mm(x_RD, up.transpose(-2, -1), offsets)
    del x_RD
    lease = None
    place = options.h
    if place.pool is not None and options.kept and not place.again:
        lease = Lease(place.pool, tuple(h.shape), h.dtype, info.rows, account=place.account, expendable=True)
    a = swiglu.forward(h, info, options.activation, lease.pages if lease else None)
    kept = _Kept(None if place.pool is not None or place.again else h, lease)
    _claim(place, kept.h)
    del h
    return grouped_mm(a, down.transpose(-2, -1), offsets), kept


def _claim(place: Place, tensor: torch.Tensor | None) -> None:
    """What autograd saves of `tensor` falls under the rule of the place's module."""
    if place.module is not None and tensor is not None:
        claim(place.module, tensor)


def _project_again(
    x_RD: torch.Tensor, up: torch.Tensor, lease: Lease | None, offsets: torch.Tensor
) -> torch.Tensor:
    """`h` for the rows whose pages are missing, in a buffer for all: no row where they are there."""
    missing = offsets
    if lease is not None:
        missing = torch.where(lease.pages.granted, torch.zeros_like(offsets), offsets)
    return grouped_mm(x_RD, up.transpose(-2, -1), missing)


def _in_dtype_of(like: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """Weights in the activations' dtype.

    Cast here, and again in backward, rather than by the caller: what autograd keeps is then the parameter
    itself, and not a copy of it that lives until backward.
    """
    return tuple(None if weight is None else weight.to(like.dtype) for weight in weights)


def _needs(ctx: Any, name: str) -> bool:
    return ctx.needs_input_grad[ctx.inputs.index(name)]


class LocalExperts(torch.autograd.Function):
    """Tokens [T, d] to tokens; see the file's head.

    Under `torch.autograd` this saves the tokens, `h` (or its pages) and indices, and nothing else of size.
    """

    inputs = ("x", "weights", "up", "down", "up_bias", "down_bias", "ids", "routing", "options")

    @staticmethod
    def forward(ctx, x, weights, up, down, up_bias, down_bias, ids, routing, options):
        offsets = routing.offsets
        up_x, down_x, up_bias_x, down_bias_x = _in_dtype_of(x, up, down, up_bias, down_bias)
        info = RowInfo(routing.rows, weights, routing.order, up_bias_x, offsets)
        capacity = routing.order.numel()
        y_RD, kept = _through(spread(x, routing.inverse, capacity), up_x, down_x, info, offsets, options)
        y = combine(
            y_RD,
            routing.inverse,
            bias=down_bias_x,
            bias_ids=ids,
            bias_weights=weights if down_bias is not None else None,
        )
        _claim(options.rows, x)
        ctx.save_for_backward(
            x, weights, up, down, up_bias, down_bias, ids, offsets, routing.order, routing.inverse, kept.h
        )
        ctx.lease, ctx.options, ctx.inputs = kept.lease, options, LocalExperts.inputs
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weights, up, down, up_bias, down_bias, ids, offsets, order, inverse, h = ctx.saved_tensors
        lease, capacity, again = ctx.lease, order.numel(), graph_is_kept()
        up, down, up_bias, down_bias = _in_dtype_of(x, up, down, up_bias, down_bias)
        info = RowInfo(offsets[-1:], weights, order, up_bias, offsets)
        dy = dy.contiguous()
        x_RD, made_here = None, h is None
        if made_here:
            x_RD = spread(x, inverse, capacity)
            h = _project_again(x_RD, up, lease, offsets)
        dy_RD = spread(dy, inverse, capacity)
        da = grouped_mm(dy_RD, down, offsets)
        # h is this node's own: unless backward will want it again, its gradient takes its place.
        dh, a, dweights = swiglu.backward(
            h,
            da,
            info,
            ctx.options.activation,
            lease.pages if lease else None,
            in_place=made_here or not again,
        )
        del h, da
        if lease is not None and not again:
            lease.close()
        ddown = grouped_mm(dy_RD.t(), a, offsets) if _needs(ctx, "down") else None
        del dy_RD, a
        dup_bias, ddown_bias = None, None
        if up_bias is not None:
            dup_bias = _bias_gradient(dh, offsets)
        if down_bias is not None:
            assert dweights is not None
            placed = torch.where(inverse >= 0, ids, -1)
            each = dy @ down_bias.t()
            at = placed.clamp(min=0).to(torch.int64)
            dweights = dweights + torch.where(inverse >= 0, each.float().gather(1, at), 0.0)
            ddown_bias = multihot(placed, weights.to(dy.dtype), down_bias.shape[0])[1].t() @ dy
        dup = None
        if _needs(ctx, "up"):
            x_RD = spread(x, inverse, capacity) if x_RD is None else x_RD
            dup = grouped_mm(dh.t(), x_RD, offsets)
        del x_RD
        dx = combine(grouped_mm(dh, up, offsets), inverse) if _needs(ctx, "x") else None
        return dx, dweights, dup, ddown, dup_bias, ddown_bias, None, None, None


class ReceivedExperts(torch.autograd.Function):
    """Rows [R, d] in expert order to rows; those past `offsets[-1]` are garbage in and out.

    `weights` [R] belong to rows, or is None. `received` is the lease of pages that already hold `x_RD`;
    without one, and with a pool, the rows are stashed here: they came over a wire, and are not expendable.
    """

    inputs = ("x_RD", "weights", "up", "down", "up_bias", "down_bias", "offsets", "received", "options")

    @staticmethod
    def forward(ctx, x_RD, weights, up, down, up_bias, down_bias, offsets, received, options):
        up_x, down_x, up_bias_x, down_bias_x = _in_dtype_of(x_RD, up, down, up_bias, down_bias)
        info = RowInfo(offsets[-1:], weights, None, up_bias_x, offsets)
        place = options.rows
        if received is None and place.pool is not None and options.kept:
            received = Lease(place.pool, tuple(x_RD.shape), x_RD.dtype, info.rows, account=place.account)
            received.write(x_RD)
        elif received is None:
            _claim(place, x_RD)
        y_RD, kept = _through(x_RD, up_x, down_x, info, offsets, options)
        if down_bias_x is not None:
            y_RD = y_RD + _row_bias(down_bias_x, offsets, weights, y_RD)
        paged = received is not None or place.pool is not None
        ctx.save_for_backward(None if paged else x_RD, weights, up, down, up_bias, down_bias, offsets, kept.h)
        ctx.lease, ctx.received, ctx.options = kept.lease, received, options
        ctx.inputs = ReceivedExperts.inputs
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RD):
        x_RD, weights, up, down, up_bias, down_bias, offsets, h = ctx.saved_tensors
        lease, received, again = ctx.lease, ctx.received, graph_is_kept()
        dy_RD = dy_RD.contiguous()
        up, down, up_bias, down_bias = _in_dtype_of(dy_RD, up, down, up_bias, down_bias)
        info = RowInfo(offsets[-1:], weights, None, up_bias, offsets)
        if received is not None:
            x_RD = received.restore()
        made_here = h is None
        if made_here:
            h = _project_again(x_RD, up, lease, offsets)
        da = grouped_mm(dy_RD, down, offsets)
        dh, a, dweights = swiglu.backward(
            h,
            da,
            info,
            ctx.options.activation,
            lease.pages if lease else None,
            in_place=made_here or not again,
        )
        del h, da
        if not again:
            for held in (lease, received):
                if held is not None:
                    held.close()
        ddown = grouped_mm(dy_RD.t(), a, offsets) if _needs(ctx, "down") else None
        del a
        dup_bias = _bias_gradient(dh, offsets) if up_bias is not None else None
        ddown_bias = None
        if down_bias is not None:
            ddown_bias = _bias_gradient(dy_RD, offsets, weights)
            if dweights is not None:
                row_bias = _row_bias(down_bias, offsets, None, dy_RD)
                valid = torch.arange(dy_RD.shape[0], device=dy_RD.device) < offsets[-1]
                product = (row_bias.float() * dy_RD.float()).sum(1)
                dweights = dweights + torch.where(valid, product, 0.0)
        dup = grouped_mm(dh.t(), x_RD, offsets) if _needs(ctx, "up") else None
        del x_RD
        dx_RD = grouped_mm(dh, up, offsets) if _needs(ctx, "x_RD") else None
        return dx_RD, dweights, dup, ddown, dup_bias, ddown_bias, None, None, None


def _row_bias(
    bias: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    """Each row's bias by its expert, times its weight; anything past the valid rows."""
    row = torch.arange(rows.shape[0], dtype=offsets.dtype, device=rows.device)
    expert = torch.searchsorted(offsets, row, right=True).clamp(max=bias.shape[0] - 1)
    value = bias[expert]
    return value if weights is None else (value.float() * weights[:, None]).to(rows.dtype)


def _bias_gradient(
    gradient: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of each expert's rows: a product with a column of ones (or weights), so its order is fixed."""
    # 16 columns: the narrowest operand that grouped_mm's alignment allows on every backend.
    column = gradient.new_ones(gradient.shape[0], 16)
    if weights is not None:
        column = weights.to(gradient.dtype)[:, None].expand(-1, 16).contiguous()
    return grouped_mm(gradient.t(), column, offsets)[..., 0].contiguous()
