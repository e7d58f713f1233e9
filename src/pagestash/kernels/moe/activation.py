"""Which activation an expert has, by name or by parameters; `activations.py` computes it. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Curve = Literal["sigmoid", "tanh", "erf", "relu2"]
CURVES: tuple[Curve, ...] = get_args(Curve)
ActivationName = Literal["silu", "gelu", "clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One activation; see the top of `activations.py`."""

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


def as_activation(activation: ActivationName | Activation) -> Activation:
    """What a name stands for."""
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


SETTINGS = "str curve, float slope, float? limit, float shift, bool gated"
"""An activation among the inputs of an operator."""


def as_settings(activation: ActivationName | Activation) -> tuple[Curve, float, float | None, float, bool]:
    found = as_activation(activation)
    return found.curve, found.slope, found.limit, found.shift, found.gated


def from_settings(settings: Sequence[Any]) -> Activation:
    curve, slope, limit, shift, gated = settings
    return Activation(curve=curve, slope=slope, limit=limit, shift=shift, gated=gated)
