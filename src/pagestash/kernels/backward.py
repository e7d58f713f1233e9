"""What the backward of an autograd function of ours needs."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's `once_differentiable`, where a graph of the gradients is made; elsewhere `backward` itself.

    Torch's opens a `no_grad` around each call, 3 µs. Without `create_graph` backward runs without gradients anyway.
    """
    with_graph = once_differentiable(backward)

    @wraps(backward)
    def either(ctx: Any, *gradients: Any) -> Any:
        return with_graph(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return either
