"""Activations of experts, each as a user would write it in torch."""

import torch
import torch.nn.functional as F

from pagestash.kernels.moe.activation import ACTIVATIONS, Activation

VARIANTS = {
    **ACTIVATIONS,
    "exact gelu": Activation(curve="erf"),
    "clamp, slope, one more": Activation(slope=1.3, limit=2.5, shift=1.0),
    "clamp, silu": Activation(limit=3.0),
    "clamp, exact gelu": Activation(curve="erf", limit=3.0),
    "relu2, no gate": Activation(curve="relu2", gated=False),
    "silu, no gate": Activation(gated=False),
}


def plain(h: torch.Tensor, activation: Activation, *, interleaved: bool = False) -> torch.Tensor:
    """[R, N] of the first projection [R, H], by autograd's own operations."""
    linear = None
    if activation.gated:
        h, linear = (h[:, 0::2], h[:, 1::2]) if interleaved else h.chunk(2, dim=1)
    if activation.limit is not None:
        h, linear = h.clamp(max=activation.limit), linear.clamp(-activation.limit, activation.limit)
    act = {
        "sigmoid": lambda: h * torch.sigmoid(activation.slope * h),
        "tanh": lambda: F.gelu(h, approximate="tanh"),
        "erf": lambda: F.gelu(h),
        "relu2": lambda: F.relu(h).square(),
    }[activation.curve]()
    return act if linear is None else act * (linear + activation.shift)


def woven(rows: torch.Tensor) -> torch.Tensor:
    """Columns of the two halves in turn: the gate of a pair, then its linear part."""
    gate, linear = rows.chunk(2, dim=1)
    return torch.stack([gate, linear], dim=2).flatten(1).contiguous()
