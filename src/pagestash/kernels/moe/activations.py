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
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from pagestash.kernels.backend import HAS_TRITON, tl, triton

Curve = Literal["sigmoid", "tanh", "erf", "relu2"]
CURVES: tuple[Curve, ...] = get_args(Curve)
ActivationName = Literal["silu", "gelu", "clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One activation; see the top of the file."""

    curve: Curve = "sigmoid"
    slope: float = 1.0
    """Of `sigmoid` alone."""
    limit: float | None = None
    shift: float = 0.0
    gated: bool = True

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ValueError(f"curve={self.curve!r}: expected one of {', '.join(CURVES)}")
        if self.slope != 1 and self.curve != "sigmoid":
            raise ValueError(f"slope={self.slope}: only the curve 'sigmoid' has one, not {self.curve!r}")
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit={self.limit}: expected a positive number, or None")
        if not self.gated and (self.limit is not None or self.shift):
            raise ValueError("gated=False: limit and shift are for an activation with a gate")

    @property
    def parts(self) -> int:
        """How many times an expert's width the first projection is wide."""
        return 2 if self.gated else 1


ACTIVATIONS: dict[ActivationName, Activation] = {
    "silu": Activation(),
    "gelu": Activation(curve="tanh"),
    "clamped": Activation(slope=1.702, limit=7.0, shift=1.0),  # gpt-oss
}

GELU_SCALE = 2 * 0.7978845608028654
GELU_CUBE = 0.044715
SQRT_HALF = 0.5**0.5
NORMAL_SCALE = (2 * math.pi) ** -0.5
K_NAN = tl.constexpr(tl.PropagateNan.ALL if HAS_TRITON else None)


def as_activation(activation: ActivationName | Activation) -> Activation:
    """What a name stands for."""
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


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
