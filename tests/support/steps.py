"""Steps as a user writes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """A function of a batch: forward, backward, and the optimizer; it returns the loss."""

    def step(*batch: Any) -> torch.Tensor:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def loss_and_gradients(
    model: nn.Module, x: torch.Tensor, keeper: Any = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of one step, under the keeper if there is one."""
    model.zero_grad()
    if keeper is None:
        loss = model(x)
        loss.backward()
    else:
        with keeper.step():
            loss = model(x)
            loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]
