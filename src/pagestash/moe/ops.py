"""The cross entropy of a projection as an operator, with its gradients: for eager mode and under `torch.compile`.

    loss = cross_entropy(hidden, weight, labels)       # saves the gradients, no logits

D columns, V words of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pagestash.kernels.backend import sum_dtype
from pagestash.kernels.loss import cross_entropy as head
from pagestash.kernels.loss import scale


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
    wide = sum_dtype(hidden.dtype)
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
