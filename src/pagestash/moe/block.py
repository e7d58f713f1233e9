"""The expert block: rows in expert order through both projections, and back.

Shapes: T tokens, K choices each, R rows of capacity, E experts here, d the model's width, n an expert's.
`up` [E, 2n, d] and `down` [E, d, n] are the projections (gate first, then linear), `h` [R, 2n] the first
one's result, `a` [R, n] the activation with the routing weight in it.

`LocalExperts` takes tokens, gathers them itself and keeps the tokens and `h`: `2·T·d + 4·T·K·n` bytes in bf16.
`SharedBlock` is the same for one expert that sees every token. Rows that came over a wire are `arrived.py`'s.
Each of the tensors that wait for backward has a `Place`. With a pool, `h` goes to pages from inside the activation
kernel; it is expendable: where the pool has none to give, backward makes it again by a product whose offsets are
zero unless the pages are missing. Under recompute the same product makes all of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from pagestash.kernels.moe import gated as gated_kernels
from pagestash.kernels.moe.ends import missing_ends
from pagestash.kernels.moe.gated import Activation, RowInfo
from pagestash.kernels.moe.grouped import grouped_mm
from pagestash.kernels.moe.permute import combine, spread, weight_gradient
from pagestash.moe.lease import Lease, graph_is_kept
from pagestash.pages.pool import PagePool
from pagestash.saved.fused import claim

COLUMNS = 16
"""The narrowest operand that `grouped_mm`'s alignment allows on every backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor waits for backward: in pages, where autograd saves it, or nowhere."""

    pool: PagePool | None = None
    account: int = 0
    again: bool = False
    """Whether backward makes it again, so that nothing waits."""
    module: nn.Module | None = None
    """Whose rule gives what autograd saves a home; None: that of the region we are in."""

    def claim(
        self, tensor: torch.Tensor | None, *, rows: torch.Tensor | None = None, capacity: int = 0
    ) -> None:
        """What autograd saves of `tensor` falls under the module's rule; of `capacity` rows `rows` are valid."""
        if tensor is not None:
            claim(self.module, tensor, rows=rows, capacity=capacity)


@dataclass(slots=True)
class Half:
    """Which gradients the backward that is running is for, where a pipeline schedule splits it in two.

    Autograd does not tell a function of Python, and would have all products computed in either half.
    """

    inputs: bool = True
    weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """What a block needs to know besides its tensors."""

    activation: Activation = "silu"
    rows: Place = Place()
    h: Place = Place()
    kept: bool = True
    """Whether a backward may follow; without one, nothing is put into pages."""
    half: Half | None = None


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
    *,
    padded: bool,
) -> tuple[torch.Tensor, _Kept]:
    """Both projections and the activation between them; and what to keep. `padded`: rows may be garbage."""
    h = grouped_mm(x_RD, up.transpose(-2, -1), offsets)
    del x_RD
    lease = None
    place = options.h
    if place.pool is not None and options.kept and not place.again:
        lease = Lease(place.pool, tuple(h.shape), h.dtype, info.rows, account=place.account, expendable=True)
    a = gated_kernels.forward(h, info, options.activation, lease.pages if lease else None)
    kept = _Kept(None if place.pool is not None or place.again else h, lease)
    place.claim(kept.h, rows=info.rows if padded else None, capacity=h.shape[0] if padded else 0)
    del h
    return grouped_mm(a, down.transpose(-2, -1), offsets), kept


def project_again(
    x_RD: torch.Tensor, up: torch.Tensor, lease: Lease | None, offsets: torch.Tensor
) -> torch.Tensor:
    """`h` for the rows whose pages are missing, in a buffer for all: no row where they are there."""
    if lease is not None:
        offsets = missing_ends(offsets, lease.pages)
    return grouped_mm(x_RD, up.transpose(-2, -1), offsets)


def in_dtype_of(like: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """Weights in the activations' dtype.

    Cast here, and again in backward, rather than by the caller: what autograd keeps is then the parameter
    itself, and not a copy of it that lives until backward.
    """
    return tuple(None if weight is None else weight.to(like.dtype) for weight in weights)


def needs(ctx: Any, name: str) -> bool:
    half = ctx.options.half
    if half is not None and not (half.weights if name in ("up", "down") else half.inputs):
        return False
    return ctx.needs_input_grad[ctx.inputs.index(name)]


class LocalExperts(torch.autograd.Function):
    """Tokens [T, d] to tokens; see the file's head.

    Under `torch.autograd` this saves the tokens, `h` (or its pages) and indices, and nothing else of size.
    """

    inputs = ("x", "weights", "up", "down", "up_bias", "down_bias", "ids", "routing", "options")

    @staticmethod
    def forward(ctx, x, weights, up, down, up_bias, down_bias, ids, routing, options):
        offsets = routing.offsets
        up_x, down_x, up_bias_x, down_bias_x = in_dtype_of(x, up, down, up_bias, down_bias)
        info = RowInfo(routing.rows, weights, routing.order, up_bias_x, offsets)
        capacity = routing.order.numel()
        y_RD, kept = _through(
            spread(x, routing.inverse, capacity), up_x, down_x, info, offsets, options, padded=True
        )
        y = combine(
            y_RD,
            routing.inverse,
            bias=down_bias_x,
            bias_ids=ids,
            bias_weights=weights if down_bias is not None else None,
        )
        options.rows.claim(x)
        claim(None, routing.order, rows=routing.rows, capacity=capacity)
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
        up, down, up_bias, down_bias = in_dtype_of(x, up, down, up_bias, down_bias)
        info = RowInfo(offsets[-1:], weights, order, up_bias, offsets)
        dy = dy.contiguous()
        x_RD, made_here = None, h is None
        if made_here:
            x_RD = spread(x, inverse, capacity)
            h = project_again(x_RD, up, lease, offsets)
        dy_RD = spread(dy, inverse, capacity)
        da = grouped_mm(dy_RD, down, offsets)
        # h is this node's own: unless backward will want it again, its gradient takes its place.
        dh, a, dweights = gated_kernels.backward(
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
        ddown = grouped_mm(dy_RD.t(), a, offsets) if needs(ctx, "down") else None
        del a
        dup_bias, ddown_bias = None, None
        if down_bias is not None:
            assert dweights is not None
            more, ddown_bias = down_bias_gradients(dy, dy_RD, weights, down_bias, ids, inverse, offsets)
            dweights = dweights + more
        del dy_RD
        if up_bias is not None:
            dup_bias = bias_gradient(dh, offsets)
        dup = None
        if needs(ctx, "up"):
            x_RD = spread(x, inverse, capacity) if x_RD is None else x_RD
            dup = grouped_mm(dh.t(), x_RD, offsets)
        del x_RD
        dx = combine(grouped_mm(dh, up, offsets), inverse) if needs(ctx, "x") else None
        return dx, dweights, dup, ddown, dup_bias, ddown_bias, None, None, None


class SharedBlock(torch.autograd.Function):
    """Tokens [T, d] through an expert that sees all of them: `up` and `down` of one expert, no weights."""

    inputs = ("x", "up", "down", "options")

    @staticmethod
    def forward(ctx, x, up, down, options):
        up_x, down_x = in_dtype_of(x, up, down)
        ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        y, kept = _through(x, up_x, down_x, RowInfo(ends), ends, options, padded=False)
        ctx.save_for_backward(x, up, down, ends, kept.h)
        ctx.lease, ctx.options, ctx.inputs = kept.lease, options, SharedBlock.inputs
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, up, down, ends, h = ctx.saved_tensors
        lease, again, made_here = ctx.lease, graph_is_kept(), h is None
        dy = dy.contiguous()
        up, down = in_dtype_of(dy, up, down)
        if made_here:
            h = project_again(x, up, lease, ends)
        da = grouped_mm(dy, down, ends)
        dh, a, _ = gated_kernels.backward(
            h,
            da,
            RowInfo(ends),
            ctx.options.activation,
            lease.pages if lease else None,
            in_place=made_here or not again,
        )
        del h, da
        if lease is not None and not again:
            lease.close()
        ddown = grouped_mm(dy.t(), a, ends) if needs(ctx, "down") else None
        del a
        dup = grouped_mm(dh.t(), x, ends) if needs(ctx, "up") else None
        dx = grouped_mm(dh, up, ends) if needs(ctx, "x") else None
        return dx, dup, ddown, None


def down_bias_gradients(
    dy: torch.Tensor,
    dy_RD: torch.Tensor,
    weights: torch.Tensor,
    down_bias: torch.Tensor,
    ids: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a bias that `combine` adds gives to the gradient of the weights [T, K], and its own [E, d].

    `dy_RD` is `dy` [T, d] in expert order. A slot that is no choice's (padding) holds garbage, perhaps NaN, and
    neither sum reads it. The bias sums by row, so an expert that a token chose twice counts twice.
    """
    chosen = torch.where(inverse >= 0, ids, -1).contiguous()
    of_weights = weight_gradient(down_bias.contiguous(), chosen, dy)
    # The weight of each row, as wide as `bias_gradient`'s column of ones.
    column = spread(dy.new_ones(dy.shape[0], COLUMNS), inverse, dy_RD.shape[0], weights.contiguous())
    return of_weights, bias_gradient(dy_RD, offsets, column)


def bias_gradient(
    gradient: torch.Tensor, offsets: torch.Tensor, column: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of each expert's rows, times their entry of `column` if given: a product, so its order is fixed."""
    if column is None:
        column = gradient.new_ones(gradient.shape[0], COLUMNS)
    return grouped_mm(gradient.t(), column, offsets)[..., 0].contiguous()
