"""LoRA on experts: PEFT's `target_parameters`, without the sum of weight and update.

PEFT wraps an experts module in one `ParamWrapper` for each weight. Its forward puts a parametrization on the module
that makes `W + s·B·A`, for as long as the module runs. Here a wrapper hands the module the factors instead, and the
block computes `x·W + s·(x·A)·B`. All else is PEFT's: its parameters, names, files, merging, disabling, switching.

Without this, the block takes the factors out of PEFT's parametrization, where there is one adapter, and saves as
little. But PEFT has computed the sum by then, to try its parametrization.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.experts import NAME, implementation, is_experts, runs_of
from pagestash.integrations.hf.layouts import first_projection
from pagestash.integrations.hf.report import Report
from pagestash.integrations.hf.weights import UPDATES
from pagestash.moe.projection import LowRank

HOOK = "_activate_lora"
"""The method of a `ParamWrapper` that has its update in place for the time of a forward."""
ASKED = ("use_pool", "use_recompute", "use_half")
"""What a keeper asks of the module that a rule names: of experts with adapters, that is the outermost wrapper."""


def take_adapters(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Let the adapters of experts, among a model's `modules`, hand our block their factors."""
    for name, wrapper in modules:
        if not _is_wrapper(wrapper):
            continue
        why = _refusal(wrapper)
        if why is not None:
            report.leave("lora", name, wrapper, why)
            continue
        setattr(wrapper, HOOK, MethodType(_activate_lora, wrapper))
        runs = runs_of(_experts_of(wrapper))
        for asked in ASKED:
            setattr(wrapper, asked, getattr(runs, asked))
        report.on_undo(partial(_give_back, wrapper))
        report.replace("lora", name, wrapper, "x·W + s·(x·A)·B, no sum of weights")


def _give_back(wrapper: nn.Module) -> None:
    for name in (HOOK, *ASKED):
        del wrapper.__dict__[name]


def _is_wrapper(module: nn.Module) -> bool:
    """Whether `module` is PEFT's, which need not be installed, and around experts."""
    return (
        type(module).__name__ == "ParamWrapper"
        and type(module).__module__.startswith("peft.")
        and is_experts(_experts_of(module))
    )


def _experts_of(wrapper: Any) -> Any:
    return wrapper.get_base_layer()


def _refusal(wrapper: Any) -> str | None:
    """Why the update must stay as PEFT applies it; None: it need not."""
    experts = _experts_of(wrapper)
    if implementation(experts) != NAME:
        return f"experts_implementation is {implementation(experts)!r}"
    if runs_of(experts) is None:
        return f"{type(experts).__name__} runs by transformers' grouped_mm"
    if wrapper.parameter_name not in (first_projection(experts), "down_proj"):
        return f"{wrapper.parameter_name} is no projection"
    if HOOK in wrapper.__dict__:
        return "optimised already"
    # A: [experts · rank, in], B: [out, rank · experts], for the weight's true in and out.
    known = getattr(wrapper, "_did_swap_in_out_features", None) is not experts.is_transposed
    if not (known and hasattr(type(wrapper), HOOK) and wrapper.num_experts == experts.num_experts > 1):
        return "this release of PEFT has its factors in another layout"
    return None


@contextmanager
def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """In the place of PEFT's: the experts module has the factors for as long as it runs."""
    experts = _experts_of(self)
    update = _update(self, [name for name in active_adapters if name in self.lora_A])
    if update is None or implementation(experts) != NAME:
        with getattr(type(self), HOOK)(self, active_adapters):
            yield
        return
    updates = experts.__dict__.setdefault(UPDATES, {})
    updates[self.parameter_name] = update
    try:
        yield
    finally:
        del updates[self.parameter_name]


def _update(wrapper: Any, adapters: list[str]) -> LowRank | None:
    """The update of the active adapters: views of one's parameters; of several, their factors side by side."""
    found = [_factors(wrapper, name) for name in adapters]
    if len(found) < 2:
        return found[0] if found else None
    a_EKI = torch.cat([each.a_EKI for each in found], dim=1)
    b_EOK = torch.cat([each.b_EOK * each.scale for each in found], dim=2)
    return LowRank(a_EKI, b_EOK, 1.0)


def _factors(wrapper: Any, adapter: str) -> LowRank:
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    return LowRank(
        a.reshape(experts, -1, a.shape[1]),
        b.reshape(b.shape[0], -1, experts).permute(2, 0, 1),
        wrapper.scaling[adapter],
    )
