"""Whether our block can run an experts module of transformers, and with which activation.

The module's flags say how its weights are laid out. Its activation is found by what it computes: candidates have
the curves of `kernels.moe.activations`, and the limit and slope that the module, or its config, has under the names
that transformers uses; one is taken if it gives what the module's `_apply_gate` (without a gate: `act_fn`) gives.
The values tried reach from 0 to 1e5 with both signs, so that a clamp nobody told us of is met, too.
"""

from typing import Any

import torch

from pagestash.integrations.hf.weights import unreadable
from pagestash.kernels.moe.activation import CURVES, Activation
from pagestash.kernels.moe.activations import activate_reference

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
LIMITS, SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
QUICK_GELU = 1.702
KNOWN = "silu, gelu (tanh, exact or quick) and relu2, plain or clamped, and gpt-oss's clamp"
NEAR = 1e-5


def first_projection(module: Any) -> str:
    """The name of its weights."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def activation_of(module: Any) -> Activation | str:
    """The activation of an experts module that our block can run; else a sentence that says why it cannot."""
    if not all(hasattr(module, flag) for flag in FLAGS):
        return "it is not a module that transformers lets another implementation run"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after its experts"
    for name in (first_projection(module), "down_proj"):
        if not hasattr(module, name):
            return f"it has no weights {name}"
        if (kind := unreadable(module, name)) is not None:
            return f"its weights are quantised ({kind})"
    return _found(module) or f"its activation is none of {KNOWN}"


def _found(module: Any) -> Activation | None:
    gate, linear = _values()
    rows = gate
    if module.has_gate:
        rows = (
            torch.cat([gate, linear]) if module.is_concatenated else torch.stack([gate, linear], 1).flatten()
        )
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            # (`_apply_gate` is the hook that transformers has for this)
            got = (module._apply_gate if module.has_gate else module.act_fn)(rows[None])[0]  # noqa: SLF001
    except Exception:  # written for other rows
        return None
    if got.shape != gate.shape or got.device != gate.device:
        return None
    most = (1 + gate.abs()) * ((1 + linear.abs()) if module.has_gate else 1)
    for each in _candidates(module):
        act, _, factor, _, _ = activate_reference(gate, linear if each.gated else gate.new_ones(()), each)
        wanted = act * factor
        if bool(((got - wanted).abs() <= NEAR * (most + wanted.abs())).all()):
            return each
    return None


def _candidates(module: Any) -> list[Activation]:
    gated = bool(module.has_gate)
    found = [Activation(curve=curve, gated=gated) for curve in CURVES]
    found.append(Activation(slope=QUICK_GELU, gated=gated))
    if gated:
        for limit in _numbers(module, LIMITS):
            found += [Activation(curve=curve, limit=limit) for curve in CURVES]
            found += [Activation(slope=slope, limit=limit, shift=1.0) for slope in _numbers(module, SLOPES)]
    return found


def _numbers(module: Any, names: tuple[str, ...]) -> list[float]:
    """The positive numbers that the module or its config has under these names."""
    owners = (module, getattr(module, "config", None))
    values = [getattr(owner, name, None) for owner in owners for name in names]
    return sorted({float(each) for each in values if isinstance(each, int | float) and each > 0})


def _values() -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and linear parts to try, each of these with each of those."""
    made: Any = {"dtype": torch.float32, "device": "cpu"}
    large = torch.logspace(1.25, 5, 12, **made)
    gate = torch.cat([-large.flip(0), torch.linspace(-16, 16, 129, **made), large])
    linear = torch.cat([-large[::3].flip(0), torch.linspace(-16, 16, 33, **made), large[::3]])
    return gate.repeat_interleave(linear.numel()), linear.repeat(gate.numel())
