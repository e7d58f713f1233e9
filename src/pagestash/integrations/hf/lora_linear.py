"""LoRA on linear layers, without PEFT's float32 copies of inputs and outputs.

PEFT's adapters are float32 parameters around a bf16 model. Their layer casts its input to float32, and autograd
keeps that cast for the gradient of `A`: 4·T·d bytes for each adapter, so three times for queries, keys and values.
The update is a float32 tensor, too, as large as the output. Here the factors are cast to bf16 instead, as PEFT
does for experts, sums are made in float32, and the input is kept as it came: one tensor for all three.
"""

from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.report import Report, patched_already
from pagestash.kernels.backward import differentiable_once


def take_linear_adapters(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Let the adapters of linear layers, among a model's `modules`, keep their input as it came."""
    for name, layer in modules:
        if type(layer).__name__ != "Linear" or type(layer).__module__ != "peft.tuners.lora.layer":
            continue
        if (why := patched_already(layer)) is not None:
            report.leave("lora", name, layer, why)
        else:
            report.put_forward(layer, _forward)
            report.replace("lora", name, layer, "in the model's dtype, its input kept as it came")


def _forward(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """In the place of PEFT's: another path for one plain float32 adapter of a bf16 layer."""
    adapter = _adapter(self, x) if not args and not options else None
    if adapter is None:
        return type(self).forward(self, x, *args, **options)
    a, b, scale = adapter
    result: torch.Tensor = _Adapted.apply(self.base_layer(x), x, a, b, scale)
    return result


def _adapter(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The factors and the scale of the only active adapter; None where PEFT must run it."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1 or active[0] in layer.lora_variant:
        return None
    (name,) = active
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = type(a) is type(b) is nn.Linear and b.bias is None and isinstance(dropout, nn.Identity)
    casts = getattr(layer, "cast_input_dtype_enabled", True) and x.dtype == torch.bfloat16 != a.weight.dtype
    if not (plain and casts) or torch.is_autocast_enabled(x.device.type):
        return None
    return a.weight, b.weight, layer.scaling[name]


class _Adapted(torch.autograd.Function):
    """`result + scale · (x·Aᵀ)·Bᵀ`, with `A` and `B` in the dtype of `x`.

    Saved are `x` and `inner = x·Aᵀ`, which has the rank's columns. T tokens, I columns in, O out, K the rank.
    """

    @staticmethod
    def forward(
        ctx: Any, result: torch.Tensor, x: torch.Tensor, a_KI: torch.Tensor, b_OK: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inner_TK = x.flatten(0, -2) @ a_KI.to(x.dtype).t()
        ctx.save_for_backward(x, inner_TK, a_KI, b_OK)
        ctx.scale = scale
        y_TO = torch.addmm(result.flatten(0, -2), inner_TK, _scaled(b_OK, scale, x.dtype).t())
        return y_TO.view(result.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner_TK, a_KI, b_OK = ctx.saved_tensors
        dy_TO = dy.flatten(0, -2)
        dinner_TK = dy_TO @ _scaled(b_OK, ctx.scale, x.dtype)
        dx, da, db = None, None, None
        if ctx.needs_input_grad[1]:
            dx = (dinner_TK @ a_KI.to(x.dtype)).view(x.shape)
        if ctx.needs_input_grad[2]:
            da = (dinner_TK.t() @ x.flatten(0, -2)).to(a_KI.dtype)
        if ctx.needs_input_grad[3]:
            db = (dy_TO.t() @ inner_TK).to(b_OK.dtype) * ctx.scale
        return dy, dx, da, db, None


def _scaled(b_OK: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """`b_OK` times the scale, rounded once to `dtype`, in one launch."""
    return torch.mul(b_OK, scale, out=torch.empty(b_OK.shape, dtype=dtype, device=b_OK.device))
