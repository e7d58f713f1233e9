"""What training frameworks keep for backward beyond the formulas of `models/costs.py`, and bytes a parameter."""

from dataclasses import dataclass, replace
from typing import Literal

Margin = Literal["window", "last"]
"""What stays of offloaded groups: a keeper's window of them, or, as in Megatron-LM, the last one of each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How a framework runs a layer, as far as memory goes."""

    name: str
    keeps_rows: bool = False
    """Whether experts keep the permuted rows also without expert parallelism."""
    activations: int = 0
    """Tensors of an expert's width that are kept beside the first projection."""
    dense_activations: int = 0
    """The same of dense and shared MLPs."""
    keeps_combined: bool = False
    """Whether the combined rows are kept, for the gradient of routing weights."""
    fused_experts: bool = False
    """Whether both expert products and the activation are one autograd node: it returns both weight gradients at
    once."""
    keeps_logits: bool = False
    """Whether the loss keeps logits; otherwise both gradients, which it computes in forward."""
    copies_values: bool = False
    """Whether attention keeps a copy of its values, not the projection that they are a view of."""
    weight_gradients: bool = True
    """Whether a whole weight gradient is a temporary tensor, before it is added to what was there."""
    margin: Margin = "window"
    loops_experts: bool = False
    """Whether experts' products are launched one by one."""
    sorts_rows: bool = False
    """Whether all-to-all leaves received rows in the order of their ranks, so that they are sorted by expert."""
    step_launches: int = 0
    """Kernels of the optimizer's step for each tensor of parameters, where it goes through them one by one."""
    waits_for_rows: bool = False
    """Whether the host waits in every layer for the number of received rows, unless buffers are static."""


FRAMEWORKS: dict[str, Framework] = {
    "pagestash": Framework(name="pagestash", fused_experts=True),
    # Transformer Engine adds weight gradients to the main gradients in the product itself.
    "megatron": Framework(
        name="megatron",
        keeps_rows=True,
        activations=1,
        dense_activations=1,
        keeps_logits=True,
        copies_values=True,
        weight_gradients=False,
        margin="last",
        loops_experts=True,
        sorts_rows=True,
        step_launches=2,
        waits_for_rows=True,
    ),
    "pith": Framework(
        name="pith",
        keeps_rows=True,
        activations=2,
        dense_activations=1,
        keeps_combined=True,
        keeps_logits=True,
        margin="last",
        waits_for_rows=True,
    ),
}
# FSDP2 with autograd's own backward, like Pith-Train; not compared with a run.
FRAMEWORKS["torchtitan"] = replace(FRAMEWORKS["pith"], name="torchtitan", keeps_combined=False)


def framework(name: str) -> Framework:
    if name not in FRAMEWORKS:
        raise ValueError(f"unknown framework {name!r}; expected one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes a parameter: of its weight, its gradient, and the optimizer's own copy and moments."""

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0

    def __post_init__(self) -> None:
        for name in ("weight", "gradient", "optimizer"):
            if not 0 <= getattr(self, name) <= 1000:
                raise ValueError(f"{name}={getattr(self, name)} bytes a parameter: expected 0 to 1,000")
