"""The activation between an expert's two projections: as torch says it and as Triton does.

    a = act(gate) · (linear + shift),    act(g) = g · sigmoid(inner(g))

| curve | inner(g), or act(g) itself |
| --- | --- |
| `sigmoid` | slope · g: with slope 1, silu |
| `tanh` | 2·√(2/π)·(g + 0.044715·g³): gelu in its tanh form, as 0.5·(1 + tanh z) is sigmoid(2z) |
| `erf` | act(g) = g · Φ(g), Φ the normal distribution: exact gelu |
| `relu2` | act(g) = max(g, 0)² |

With a `limit`, first the gate is cut off above it and the linear part beyond ±limit. At the limit itself a gradient
passes, as with `torch.clamp` up to torch 2.13; newer ones pass none. Without a gate (`gated=False`) there is no
linear part: a = act(h).

To add a curve: its name in `Curve`, a case in `activate_reference` and the same case in `activate`. Both give
act(gate), its slope, the linear part as it is multiplied, and 0 where a clamp lets no gradient through (else 1).
All in float32, or in float64 for that.
"""

import math
from typing import Any

import torch

from pagestash.kernels.backend import HAS_TRITON, tl, triton
from pagestash.kernels.moe.activation import CURVES, Activation

GELU_SCALE = 2 * 0.7978845608028654
GELU_CUBE = 0.044715
SQRT_HALF = 0.5**0.5
NORMAL_SCALE = (2 * math.pi) ** -0.5
K_NAN = tl.constexpr(tl.PropagateNan.ALL if HAS_TRITON else None)


def activate_reference(
    gate: torch.Tensor, linear: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, ...]:
    """act(gate), its slope, the linear part, and which gates and linear parts carry a gradient.

    Without a gate, `linear` is 1.
    """
    passes_gate = passes_linear = torch.ones_like(gate)
    limit, curve = activation.limit, activation.curve
    if limit is not None:
        passes_gate = (gate <= limit).to(gate.dtype)
        passes_linear = (linear.abs() <= limit).to(gate.dtype)
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    if activation.shift:
        linear = linear + activation.shift
    if curve == "relu2":
        act = gate.clamp(min=0)
        return act * act, 2 * act, linear, passes_gate, passes_linear
    if curve == "erf":
        share = 0.5 * (1 + torch.erf(SQRT_HALF * gate))
        density = NORMAL_SCALE * torch.exp(-0.5 * gate * gate)
        return gate * share, share + gate * density, linear, passes_gate, passes_linear
    if curve == "tanh":
        inner = GELU_SCALE * (gate + GELU_CUBE * gate**3)
        inner_slope: Any = GELU_SCALE * (1 + 3 * GELU_CUBE * gate**2)
    else:
        inner, inner_slope = activation.slope * gate, activation.slope
    sigmoid = torch.sigmoid(inner)
    slope = sigmoid * (1 + gate * (1 - sigmoid) * inner_slope)
    return gate * sigmoid, slope, linear, passes_gate, passes_linear


def constants(activation: Activation) -> dict[str, Any]:
    """What `activate` asks for, to launch a kernel that uses it."""
    return {
        "CURVE": CURVES.index(activation.curve),
        "SLOPE": activation.slope,
        "LIMIT": activation.limit,
        "SHIFT": activation.shift,
    }


@triton.jit
def activate(
    gate,
    linear,
    GATED: tl.constexpr,
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    GELU_SCALE: tl.constexpr = 1.5957691216057308,
    GELU_CUBE: tl.constexpr = 0.044715,
    GELU_CUBE_SLOPE: tl.constexpr = 3 * 0.044715,
    SQRT_HALF: tl.constexpr = 0.5**0.5,
    NORMAL_SCALE: tl.constexpr = 0.3989422804014327,
):
    """`activate_reference` for the curve `CURVES[CURVE]`.

    Without a gate `linear` is not used, and the compiler drops its loads. The constants are those above; see
    `granted_bytes` for why they are literals.
    """
    if not GATED:
        linear = 1.0
    passes_gate = 1.0
    passes_linear = 1.0
    if LIMIT is not None:
        passes_gate = tl.where(gate <= LIMIT, 1.0, 0.0)
        passes_linear = tl.where(tl.abs(linear) <= LIMIT, 1.0, 0.0)
        # As torch.clamp does: a NaN stays one, and is not hidden behind the limit.
        gate = tl.minimum(gate, LIMIT, propagate_nan=K_NAN)
        linear = tl.maximum(linear, -LIMIT, propagate_nan=K_NAN)
        linear = tl.minimum(linear, LIMIT, propagate_nan=K_NAN)
    if SHIFT != 0.0:
        linear = linear + SHIFT
    if CURVE == 3:
        positive = tl.maximum(gate, 0.0, propagate_nan=K_NAN)
        act = positive * positive
        slope = 2.0 * positive
    elif CURVE == 2:
        share = 0.5 * (1.0 + tl.erf(gate * SQRT_HALF))
        act = gate * share
        slope = share + gate * NORMAL_SCALE * tl.exp(-0.5 * gate * gate)
    else:
        inner_slope = SLOPE
        inner = gate
        if CURVE == 1:
            inner = GELU_SCALE * (gate + GELU_CUBE * gate * gate * gate)
            inner_slope = GELU_SCALE * (1.0 + GELU_CUBE_SLOPE * gate * gate)
        elif SLOPE != 1.0:
            inner = SLOPE * gate
        sigmoid = tl.sigmoid(inner)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid) * inner_slope)
        act = gate * sigmoid
    return act, slope, linear, passes_gate, passes_linear
