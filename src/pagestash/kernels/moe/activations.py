"""The activations between an expert's two projections: each as torch says it and as Triton does.

    a = act(gate) · linear,    act(g) = g · sigmoid(inner(g))

| name | inner(g) | before |
| --- | --- | --- |
| `silu` | g | |
| `gelu` | 2·√(2/π)·(g + 0.044715·g³), the tanh form: 0.5·(1 + tanh z) is sigmoid(2z) | |
| `clamped` | 1.702·g (gpt-oss) | g to at most 7, linear to ±7 and then 1 more |

To add one: its name in `Activation`, a case in `activate_reference` and the same case in `activate`. Both give
act(gate), its slope, the linear part as it is multiplied, and 0 where a clamp lets no gradient through (else 1).
All in float32, or in float64 for that.
"""

from typing import Literal, get_args

import torch

from pagestash.kernels.backend import tl, triton

Activation = Literal["silu", "gelu", "clamped"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

CLAMP = 7.0
CLAMPED_SLOPE = 1.702
GELU_SCALE = 2 * 0.7978845608028654
GELU_CUBE = 0.044715
# The same for Triton, which reads globals only when they are constexpr.
K_CLAMP = tl.constexpr(CLAMP)
K_CLAMPED_SLOPE = tl.constexpr(CLAMPED_SLOPE)
K_GELU_SCALE = tl.constexpr(GELU_SCALE)
K_GELU_CUBE = tl.constexpr(GELU_CUBE)
K_GELU_CUBE_SLOPE = tl.constexpr(3 * GELU_CUBE)


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")


def activate_reference(
    gate: torch.Tensor, linear: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, ...]:
    """act(gate), its slope, the linear part, and which gates and linear parts carry a gradient."""
    passes_gate = passes_linear = torch.ones_like(gate)
    if activation == "clamped":
        passes_gate = (gate <= CLAMP).to(gate.dtype)
        passes_linear = (linear.abs() <= CLAMP).to(gate.dtype)
        gate = gate.clamp(max=CLAMP)
        linear = linear.clamp(-CLAMP, CLAMP) + 1
        inner, inner_slope = CLAMPED_SLOPE * gate, torch.full_like(gate, CLAMPED_SLOPE)
    elif activation == "gelu":
        inner = GELU_SCALE * (gate + GELU_CUBE * gate**3)
        inner_slope = GELU_SCALE * (1 + 3 * GELU_CUBE * gate**2)
    else:
        inner, inner_slope = gate, torch.ones_like(gate)
    sigmoid = torch.sigmoid(inner)
    slope = sigmoid * (1 + gate * (1 - sigmoid) * inner_slope)
    return gate * sigmoid, slope, linear, passes_gate, passes_linear


@triton.jit
def activate(gate, linear, ACT: tl.constexpr):
    """`activate_reference` for the activation `ACTIVATIONS[ACT]`."""
    passes_gate = 1.0
    passes_linear = 1.0
    inner_slope = 1.0
    inner = gate
    if ACT == 2:
        passes_gate = tl.where(gate <= K_CLAMP, 1.0, 0.0)
        passes_linear = tl.where(tl.abs(linear) <= K_CLAMP, 1.0, 0.0)
        gate = tl.minimum(gate, K_CLAMP)
        linear = tl.minimum(tl.maximum(linear, -K_CLAMP), K_CLAMP) + 1.0
        inner = K_CLAMPED_SLOPE * gate
        inner_slope = K_CLAMPED_SLOPE
    elif ACT == 1:
        inner = K_GELU_SCALE * (gate + K_GELU_CUBE * gate * gate * gate)
        inner_slope = K_GELU_SCALE * (1.0 + K_GELU_CUBE_SLOPE * gate * gate)
    sigmoid = tl.sigmoid(inner)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid) * inner_slope)
    return gate * sigmoid, slope, linear, passes_gate, passes_linear
