"""An autograd function of ours as an operator: what a compiler puts into its graph and does not look into.

In eager mode the function is applied as it is: an operator costs the host 0.2 ms more. Both run the same `forward`
and `backward`, which get a `Context` in the place of autograd's here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

Fake = Callable[..., Sequence[Tensor]]


class Context:
    """What `forward` and `backward` of an autograd function ask for, where autograd does not run them."""

    def __init__(self, saved: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        self.saved_tensors, self.needs_input_grad = saved, needs
        self.settings: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        """A graph keeps what its operators are given."""


def operator(
    name: str, function: Any, schema: str, fake: Fake, *, keeps: Sequence[int], results: int = 1
) -> Callable[..., list[Tensor]]:
    """`function` as the operator `pagestash::name`: its inputs are those of `schema`, tensors first, then settings.

    `function` takes the settings as one tuple, and `ctx.settings` is that tuple in backward. It saves its tensors
    number `keeps`, in this order, and then what it made, which the operator returns after its `results`. `fake` is
    called with the same inputs, and says of what shape, strides and dtype all that is.

    The gradient of a tensor that is kept is like it; that of another like the gradient of the result in its place.
    """
    inputs = schema.split(", ")
    count = sum(each.startswith("Tensor") for each in inputs)
    of_backward = ", ".join(["Tensor[] gradients", "Tensor?[] saved", "bool[] needs", *inputs[count:]])

    def forward(*given: Any) -> list[Tensor]:
        ctx = Context((), [True] * count)
        made = function.forward(ctx, *given[:count], given[count:])
        made = made if isinstance(made, tuple) else (made,)
        return [*made, *(each for each in ctx.saved_tensors[len(keeps) :] if each is not None)]

    def backward(
        gradients: Sequence[Tensor], saved: Sequence[Tensor | None], needs: Sequence[bool], *settings: Any
    ) -> list[Tensor]:
        ctx = Context(saved, needs)
        ctx.settings = settings
        found = function.backward(ctx, *gradients)
        return [as_like(found[at], each) for at, each in likes(gradients, saved, needs)]

    def likes(
        gradients: Sequence[Tensor], saved: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[tuple[int, Tensor]]:
        of_inputs = dict(zip(keeps, saved))
        found = ((at, of_inputs.get(at, gradients[min(at, results - 1)])) for at in range(count) if needs[at])
        return [(at, each) for at, each in found if each is not None]

    def fake_backward(
        gradients: Sequence[Tensor], saved: Sequence[Tensor | None], needs: Sequence[bool], *_: Any
    ) -> list[Tensor]:
        return [torch.empty_like(each) for _, each in likes(gradients, saved, needs)]

    back = custom_op(
        f"pagestash::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"({of_backward}) -> Tensor[]",
    )
    back.register_fake(fake_backward)
    op = custom_op(f"pagestash::{name}", forward, mutates_args=(), schema=f"({schema}) -> Tensor[]")
    op.register_fake(lambda *given: list(fake(*given)))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        made = output[results:]
        ctx.save_for_backward(*(inputs[at] for at in keeps), *made)
        ctx.mark_non_differentiable(*made)
        ctx.settings = inputs[count:]

    def gradients(ctx: Any, given: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:count])
        found = iter(back(list(given[:results]), list(ctx.saved_tensors), needs, *ctx.settings))
        return *(next(found) if need else None for need in needs), *[None for _ in ctx.settings]

    op.register_autograd(gradients, setup_context=setup)
    return op


def as_like(gradient: Tensor, input: Tensor) -> Tensor:
    """`gradient` in the dtype and the strides of what it is the gradient of, as the fake says."""
    wanted = torch.empty_like(input, device="meta")
    if (gradient.dtype, gradient.stride()) == (wanted.dtype, wanted.stride()):
        return gradient
    return torch.empty_like(input).copy_(gradient)
