"""What both blocks of experts take, and what their backward passes have in common.

R rows in expert order, E experts, D the model's width; T tokens, or slots that came off the wire, of K choices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pagestash.kernels.gemm.rows import Rows, in_memory
from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.route import Routing
from pagestash.moe.bias import down_bias_gradient, weights_gradient_of_bias
from pagestash.moe.projection import Form, Projection, Weight
from pagestash.moe.saving import OF_WEIGHTS, BlockOptions, needs

INPUTS = ("x", "weights", *OF_WEIGHTS, "call")
"""What a block's autograd function is applied to; all but the call may require a gradient."""


class Call(NamedTuple):
    """What a block needs besides the tensors that may require a gradient."""

    ids_TK: torch.Tensor | None
    """Read for the sake of `down`'s bias alone."""
    routing: Routing
    options: BlockOptions
    forms: tuple[Form, Form]
    """What `up` and `down` are besides their tensors."""

    @classmethod
    def of(
        cls, up: Weight, down: Weight, ids_TK: torch.Tensor, routing: Routing, options: BlockOptions
    ) -> "Call":
        ids = None if down.bias_EO is None else ids_TK.contiguous()
        return cls(ids, routing, options, (up.form(), down.form()))


def projections(
    forms: tuple[Form, Form], matrices: Sequence[torch.Tensor | None], like: torch.Tensor
) -> tuple[Projection, Projection]:
    """`up` and `down`, of the tensors that `OF_WEIGHTS` names."""
    return forms[0].projection(matrices[:4], like), forms[1].projection(matrices[4:], like)


def combined(y_RD: torch.Tensor, weights_TK: torch.Tensor, down: Projection, call: Call) -> torch.Tensor:
    """What the second projection gives for rows: with its bias, times the choices' weights, summed by token."""
    return combine(y_RD, call.routing.inverse, weights_TK, bias_ED=down.bias_EO, bias_ids_TK=call.ids_TK)


def weight_gradients(
    ctx: Any,
    name: str,
    by: Projection,
    dy: Rows,
    x: Rows | None,
    dinner_RK: torch.Tensor | None,
    bounds: torch.Tensor,
    *,
    paired: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Those of the projection `name` and of its update's factors, as far as they are asked for; else None."""
    dweight = None
    of_factors: tuple[torch.Tensor | None, ...] = (None, None)
    if needs(ctx, name):
        assert x is not None
        dweight = by.gradient(dy, x, bounds, paired=paired)
    if dinner_RK is not None and (needs(ctx, f"{name}_a") or needs(ctx, f"{name}_b")):
        assert x is not None
        of_factors = by.update_gradients(x, dy, dinner_RK, bounds)
    return dweight, *of_factors


def down_bias_gradients(
    ctx: Any,
    dweights_TK: torch.Tensor,
    down_bias_ED: torch.Tensor | None,
    dy_TD: torch.Tensor,
    dy: Rows,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    inverse_TK: torch.Tensor,
    bounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of the routing weights with what the second bias adds, and the bias's own if it is asked for."""
    if down_bias_ED is None:
        return dweights_TK, None
    dweights_TK = dweights_TK + weights_gradient_of_bias(dy_TD, down_bias_ED, ids_TK, inverse_TK)
    if not needs(ctx, "down_bias"):
        return dweights_TK, None
    return dweights_TK, down_bias_gradient(dy_TD, in_memory(dy), weights_TK, inverse_TK, bounds)
