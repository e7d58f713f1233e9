"""The kernels as `torch.library` operators, with fake implementations and autograd.

For code that is not `MoE`: they work in eager mode and under `torch.compile`. Importing this file registers
them as `torch.ops.pagestash.*`; the functions below are the same with names.

    counts, offsets, order, inverse = route(ids, experts)
    rows = permute(x, inverse, capacity)               # saves indices only
    a = gated(h, offsets[-1:], weights, order)         # saves h only
    y = combine(rows, inverse)                         # saves indices only
    loss = cross_entropy(hidden, weight, labels)       # saves the gradients, no logits

T tokens, K choices, E experts, R rows of capacity, D and N columns, V words of the vocabulary.

Rows of a buffer that no choice has are zero, in results and in gradients: a product over the whole buffer, such
as a weight's gradient, is then right. The kernels themselves leave these rows uninitialised, and do not read
them.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from pagestash.kernels.backend import choose
from pagestash.kernels.loss import cross_entropy as head
from pagestash.kernels.loss import scale
from pagestash.kernels.moe import combine as combine_kernels
from pagestash.kernels.moe import gated as gated_kernels
from pagestash.kernels.moe import permute as permute_kernels
from pagestash.kernels.moe import route as route_kernels
from pagestash.kernels.moe.activation import ActivationName
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.kernels.pages.tail import zero_tail


@custom_op("pagestash::route", mutates_args=())
def route(
    ids: Tensor, experts: int, first: int = 0, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and offsets [experts], order [capacity] and inverse [T, K] of chosen expert ids [T, K]."""
    found = route_kernels.route(ids, experts, first=first, capacity=capacity)
    return found.counts, found.offsets.clone(), found.order, found.inverse


@route.register_fake
def _(ids: Tensor, experts: int, first: int = 0, capacity: int | None = None) -> tuple[Tensor, ...]:
    def made(*shape: int) -> Tensor:
        return ids.new_empty(shape, dtype=torch.int32)

    rows = ids.numel() if capacity is None else capacity
    return made(experts), made(experts), made(rows), made(*ids.shape)


@custom_op("pagestash::multihot", mutates_args=())
def multihot(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Bool [T, E], true where chosen, and the weights there, zero elsewhere."""
    return route_kernels.multihot(ids, weights, experts)


@multihot.register_fake
def _(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    shape = (ids.shape[0], experts)
    return ids.new_empty(shape, dtype=torch.bool), weights.new_empty(shape)


def _multihot_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(output[0])


def _multihot_backward(ctx: Any, _chosen: Any, ddense: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    inside = (ids >= 0) & (ids < ddense.shape[1])
    taken = ddense.gather(1, torch.where(inside, ids, 0).to(torch.int64))
    return None, torch.where(inside, taken, 0.0), None


multihot.register_autograd(_multihot_backward, setup_context=_multihot_setup)


@custom_op("pagestash::permute", mutates_args=())
def permute(tokens: Tensor, inverse: Tensor, capacity: int) -> Tensor:
    """Tokens [T, D] in the rows [capacity, D] of their choices; other rows are zero."""
    return _permute_into_zeros(tokens.contiguous(), inverse, capacity)


def _permute_into_zeros(
    tokens: Tensor, inverse: Tensor, capacity: int, weights: Tensor | None = None
) -> Tensor:
    """`permute`, with zeros in the rows that no choice has."""
    zeros = tokens.new_zeros(capacity, tokens.shape[1])
    return permute_kernels.permute(tokens, inverse, capacity, weights, out_RD=zeros)


def _zero_past(rows: Tensor, count: Tensor) -> Tensor:
    """`rows` [R, N], with zeros written from row `count`, a device integer, on."""
    zero_tail(rows.view(torch.uint8), count, choose(rows.device, "auto"))
    return rows


@permute.register_fake
def _(tokens: Tensor, inverse: Tensor, capacity: int) -> Tensor:
    return tokens.new_empty(capacity, tokens.shape[1])


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
    (inverse,) = ctx.saved_tensors
    return combine(drows, inverse), None, None


permute.register_autograd(_permute_backward, setup_context=_permute_setup)
gather = permute
"""Its former name."""


@custom_op("pagestash::combine", mutates_args=())
def combine(rows: Tensor, inverse: Tensor, weights: Tensor | None = None) -> Tensor:
    """Each token's rows, times `weights` [T, K] where given, summed in the order of the choices: [T, D]."""
    return combine_kernels.combine(rows.contiguous(), inverse, weights)


@combine.register_fake
def _(rows: Tensor, inverse: Tensor, weights: Tensor | None = None) -> Tensor:
    return rows.new_empty(inverse.shape[0], rows.shape[1])


@custom_op("pagestash::combine_backward", mutates_args=())
def _combine_backward_op(
    gradient: Tensor, inverse: Tensor, weights: Tensor | None, rows: Tensor | None, capacity: int
) -> tuple[Tensor, Tensor]:
    gradient = gradient.contiguous()
    drows = _permute_into_zeros(gradient, inverse, capacity, weights)
    if rows is None:
        return drows, gradient.new_empty(0, dtype=torch.float32)
    return drows, combine_kernels.weight_gradient(rows, inverse, gradient)


@_combine_backward_op.register_fake
def _(
    gradient: Tensor, inverse: Tensor, weights: Tensor | None, rows: Tensor | None, capacity: int
) -> tuple[Tensor, Tensor]:
    shape = (0,) if rows is None else inverse.shape
    return gradient.new_empty(capacity, gradient.shape[1]), gradient.new_empty(shape, dtype=torch.float32)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, inverse, weights = inputs
    # Without weights the rows themselves are not needed again.
    ctx.save_for_backward(inverse, weights, None if weights is None else rows)
    ctx.capacity = rows.shape[0]


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    inverse, weights, rows = ctx.saved_tensors
    drows, dweights = _combine_backward_op(dy, inverse, weights, rows, ctx.capacity)
    return drows, None, None if weights is None else dweights.to(weights.dtype)


combine.register_autograd(_combine_backward, setup_context=_combine_setup)


@custom_op("pagestash::gated", mutates_args=())
def gated(
    h: Tensor,
    rows: Tensor,
    weights: Tensor | None = None,
    order: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """`act(gate) · linear · weight` [R, N] for the first `rows` (a device integer) of `h` [R, 2N], then zeros."""
    info = RowInfo(rows, weights, order)
    return _zero_past(gated_kernels.forward(h.contiguous(), info, cast(ActivationName, activation)), rows)


@gated.register_fake
def _(
    h: Tensor,
    rows: Tensor,
    weights: Tensor | None = None,
    order: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


@custom_op("pagestash::gated_backward", mutates_args=())
def _gated_backward_op(
    h: Tensor, gradient: Tensor, rows: Tensor, weights: Tensor | None, order: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    info = RowInfo(rows, weights, order)
    kind = cast(ActivationName, activation)
    dh, _, dweights = gated_kernels.backward(h.contiguous(), gradient.contiguous(), info, kind)
    return _zero_past(dh, rows), h.new_empty(0, dtype=torch.float32) if dweights is None else dweights


@_gated_backward_op.register_fake
def _(
    h: Tensor, gradient: Tensor, rows: Tensor, weights: Tensor | None, order: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    shape = (0,) if weights is None else weights.shape
    return torch.empty_like(h), h.new_empty(shape, dtype=torch.float32)


def _gated_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    h, rows, weights, order, ctx.activation = inputs
    ctx.save_for_backward(h, rows, weights, order)


def _gated_backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
    h, rows, weights, order = ctx.saved_tensors
    dh, dweights = _gated_backward_op(h, da, rows, weights, order, ctx.activation)
    return dh, None, None if weights is None else dweights.to(weights.dtype), None, None


gated.register_autograd(_gated_backward, setup_context=_gated_setup)


@custom_op("pagestash::scaled", mutates_args=())
def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.scaled(gradient, by, dtype)


@_scaled.register_fake
def _(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


@custom_op("pagestash::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    soft_cap: float | None,
    mean: bool,
    chunk: int | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = head.LossOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        mean=mean,
        chunk=chunk,
    )
    loss, dhidden, dweight = head.linear_cross_entropy(
        hidden.contiguous(), weight, labels, options, need_hidden=need_hidden, need_weight=need_weight
    )
    empty = hidden.new_empty(0)
    return loss, empty if dhidden is None else dhidden, empty.clone() if dweight is None else dweight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    soft_cap: float | None,
    mean: bool,
    chunk: int | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    dhidden = torch.empty_like(hidden) if need_hidden else hidden.new_empty(0)
    dweight = weight.new_empty(weight.shape, dtype=wide) if need_weight else hidden.new_empty(0)
    return hidden.new_empty((), dtype=wide), dhidden, dweight


def _loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)  # zeros as large as the weight, that nobody reads
    ctx.dtype, ctx.need = inputs[1].dtype, inputs[10:12]


def _loss_backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:  # nothing depends on the loss
        return (None,) * 12
    # Not in place: a backward that comes again finds the same gradients.
    dhidden, dweight = ctx.saved_tensors
    need_hidden, need_weight = ctx.need
    of_hidden = _scaled(dhidden, dloss, dhidden.dtype) if need_hidden else None
    of_weight = _scaled(dweight, dloss, ctx.dtype) if need_weight else None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        asks = torch.empty(0, requires_grad=True)
        of_hidden, of_weight = (
            None if each is None else _Final.apply(each, asks) for each in (of_hidden, of_weight)
        )
    return (of_hidden, of_weight, *[None] * 10)


class _Final(torch.autograd.Function):
    """A gradient that has none itself, and says so where it is asked for one."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, asks: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "the loss by chunks of logits (pagestash.moe.ops.cross_entropy, and the head that pagestash.hf "
            "replaces) has no second derivative; take the loss of logits: optimize(model, head=False)"
        )


_linear_cross_entropy.register_autograd(_loss_backward, setup_context=_loss_setup)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """The cross entropy (float32) of `hidden` [..., D] projected by `weight` [V, D], without keeping logits.

    Logits are multiplied by `logit_scale`, and bent below `soft_cap` by a tanh, before their loss. Gradients are
    computed with the loss, `chunk` tokens at a time, and scaled in backward; those of gradients are refused.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
    grad = torch.is_grad_enabled()
    loss, _, _ = _linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        ignore_index,
        label_smoothing,
        z_loss,
        logit_scale,
        soft_cap,
        reduction == "mean",
        chunk,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return loss
