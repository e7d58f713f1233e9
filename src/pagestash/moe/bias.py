"""The gradients of the experts' biases, and what the second one's add to those of the routing weights.

The bias of the first projection is added to its rows. That of the second is added by `combine`, times the choice's
weight: it is no part of the rows, so its gradients come from the tokens'.

T tokens of K choices, R rows in expert order, E experts, D columns.
"""

import torch

from pagestash.kernels.gemm.products import TORCH
from pagestash.kernels.moe.combine import weight_gradient
from pagestash.kernels.moe.permute import permute

COLUMNS = 16
"""The narrowest operand that torch's grouped product takes on every device."""


def bias_gradient(
    gradient_RD: torch.Tensor, bounds: torch.Tensor, column_RC: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of each expert's rows, times their entry of the column if given: a product, so its order is fixed."""
    if column_RC is None:
        column_RC = gradient_RD.new_ones(gradient_RD.shape[0], COLUMNS)
    return TORCH.weight_gradient(gradient_RD, column_RC, bounds)[..., 0].contiguous()


def down_bias_gradient(
    dy_TD: torch.Tensor,
    dy_RD: torch.Tensor,
    weights_TK: torch.Tensor,
    inverse_TK: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:
    """The gradient [E, D] of a bias that `combine` adds; `dy_RD` is `dy_TD` in expert order.

    It sums by row, so an expert that a token chose twice counts twice. Padding is not read.
    """
    # The weight of each row, as wide as `bias_gradient`'s column of ones.
    ones_TC = dy_TD.new_ones(dy_TD.shape[0], COLUMNS)
    column_RC = permute(ones_TC, inverse_TK, dy_RD.shape[0], weights_TK.contiguous())
    return bias_gradient(dy_RD, bounds, column_RC)


def weights_gradient_of_bias(
    dy_TD: torch.Tensor, down_bias_ED: torch.Tensor, ids_TK: torch.Tensor, inverse_TK: torch.Tensor
) -> torch.Tensor:
    """What a bias that `combine` adds gives to the gradient of the weights [T, K].

    A slot that is no choice's (padding) holds garbage, perhaps NaN, and is not read.
    """
    chosen_TK = torch.where(inverse_TK >= 0, ids_TK, -1).contiguous()
    return weight_gradient(down_bias_ED.contiguous(), chosen_TK, dy_TD)
