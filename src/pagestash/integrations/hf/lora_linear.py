"""LoRA on linear layers: PEFT's numbers, without its float32 copies of the input.

PEFT's adapters are float32 parameters around a bf16 model. Their layer casts its input to float32, and autograd
keeps that cast for the gradient of `A`: 4·T·d bytes for each adapter, so three times for queries, keys and values.
Here the input is kept as it came, which is one tensor for all three, and cast again in backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from pagestash.integrations.hf.report import Report, patched_already


def take_linear_adapters(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Let the adapters of linear layers, among a model's `modules`, keep their input as it came."""
    for name, layer in modules:
        if type(layer).__name__ != "Linear" or type(layer).__module__ != "peft.tuners.lora.layer":
            continue
        if (why := patched_already(layer)) is not None:
            report.leave("lora", name, layer, why)
        else:
            report.put_forward(layer, *_forward())
            report.replace("lora", name, layer, "its input kept as it came")


def _forward() -> tuple[Callable[..., torch.Tensor], Callable[[], None]]:
    """In the place of PEFT's: another path for one plain adapter of another dtype than `x`. And its way off."""
    on = True

    def forward(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        adapter = _adapter(self, x) if on and not args and not options else None
        if adapter is None:
            return type(self).forward(self, x, *args, **options)
        a, b, scale = adapter
        result: torch.Tensor = _Adapted.apply(self.base_layer(x), x, a, b, scale)
        return result

    def off() -> None:
        nonlocal on
        on = False

    return forward, off


def _adapter(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The factors and the scale of the only active adapter; None where PEFT must run it."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1 or active[0] in layer.lora_variant:
        return None
    (name,) = active
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = type(a) is type(b) is nn.Linear and b.bias is None and isinstance(dropout, nn.Identity)
    casts = getattr(layer, "cast_input_dtype_enabled", True) and x.dtype != a.weight.dtype
    if not (plain and casts) or torch.is_autocast_enabled(x.device.type):
        return None
    return a.weight, b.weight, layer.scaling[name]


class _Adapted(torch.autograd.Function):
    """`result + scale · (x·Aᵀ)·Bᵀ`, in the dtype of `A` and `B`, rounded to that of `result` once.

    Saved are `x` and `x·Aᵀ`, which has the rank's columns.
    """

    @staticmethod
    def forward(
        ctx: Any, result: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inner = F.linear(x.to(a.dtype), a)
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale = scale
        return F.linear(inner, b).mul_(scale).add_(result).to(result.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        wide = dy.to(b.dtype).mul_(ctx.scale).flatten(0, -2)
        dinner = wide @ b
        dx, da, db = None, None, None
        if ctx.needs_input_grad[1]:
            dx = (dinner @ a).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[2]:
            da = dinner.t() @ x.to(a.dtype).flatten(0, -2)
        if ctx.needs_input_grad[3]:
            db = wide.t() @ inner.flatten(0, -2)
        return dy, dx, da, db, None
