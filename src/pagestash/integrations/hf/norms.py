"""RMSNorm modules of any model, known by what they compute.

A norm is taken over if, run on random bf16 and float32 rows, its own `forward` gives what one of the forms of our
kernel gives. That holds for classes of models that this file has never heard of, and fails for those that do more.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.report import Report, patched_already
from pagestash.kernels.layer.rms_norm import forward_reference, rms_norm
from pagestash.saved.storage import PLAIN_TENSORS

FORMS = {"Llama's": (0.0, True), "gpt-oss's": (0.0, False), "Gemma's": (1.0, False)}
"""(offset, early) by the model that has it."""

WIDTH = 64
"""Of the rows that a norm without a weight is tried on."""


def replace_norms(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Give each RMSNorm among `modules`, with their names, our kernel."""
    known: dict[Any, str | None] = {}
    for name, module in modules:
        if "RMSNorm" not in type(module).__name__:
            continue
        why = patched_already(module)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if why is None and not isinstance(eps, float):
            why = "it has no eps to be read"
        if why is None and len(inspect.signature(type(module).forward).parameters) > 2:
            why = "its forward takes more than rows"
        if why is not None:
            report.leave("norm", name, module, why)
            continue
        assert isinstance(eps, float)
        # Two of one class may differ in what they were made with: the size of a group, say.
        plain = {key: value for key, value in vars(module).items() if type(value) in (bool, int, float, str)}
        key = type(module), _width(module), tuple(sorted(plain.items()))
        if key not in known:
            known[key] = _form(module, eps)
        form = known[key]
        if form is None:
            report.leave("norm", name, module, "it computes something else than the kernel")
            continue
        report.put_forward(module, _norm(eps, *FORMS[form]))
        report.replace("norm", name, module, f"the RMSNorm kernel, {form} rounding")


@cache  # one function for all norms that are alike
def _norm(eps: float, offset: float, early: bool) -> Callable[..., torch.Tensor]:
    """A `forward` by the kernel."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, "weight", None)
        if weight is not None and type(weight) not in PLAIN_TENSORS:  # of DTensors kernels know nothing
            return type(self).forward(self, hidden_states)
        return rms_norm(hidden_states, weight, eps, offset=offset, early=early)

    return forward


def _form(module: nn.Module, eps: float) -> str | None:
    """The form that `module` computes, found by running it on the CPU; None if it is none of them."""
    # (A class that FSDP2 has made has a `__new__` that runs `__init__`.)
    probe: Any = object.__new__(type(module))
    nn.Module.__init__(probe)
    children = ("_parameters", "_buffers", "_modules")
    probe.__dict__.update({key: value for key, value in module.__dict__.items() if key not in children})
    generator = torch.Generator().manual_seed(0)
    width = _width(module)
    x = torch.randn(max(16, 256 * WIDTH // (width or WIDTH)), width or WIDTH, generator=generator)
    weight = None
    if width is not None:
        weight = nn.Parameter(torch.randn(width, generator=generator), requires_grad=False)
    return next((form for form in FORMS if _computes(probe, form, x, weight, eps)), None)


def _width(module: Any) -> int | None:
    """Of the module's own weight; None if it has none. (Where FSDP has divided it, any width will do.)"""
    weight = getattr(module, "weight", None)
    return None if weight is None else weight.shape[-1] or WIDTH


def _computes(probe: Any, form: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> bool:
    offset, early = FORMS[form]
    for dtype in (torch.float32, torch.bfloat16):
        by = None if weight is None else nn.Parameter(weight.to(dtype), requires_grad=False)
        if by is not None:
            probe.weight = by
        try:
            with torch.no_grad():
                got = type(probe).forward(probe, x.to(dtype))
        except Exception:  # a forward of other arguments, or that needs more than a weight
            return False
        wanted, _ = forward_reference(x.to(dtype), by, eps, offset, early)
        if not isinstance(got, torch.Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
            return False
        # A root taken another way may differ by a last bit in float32, and so now and then in bf16. The forms
        # differ from each other in a third of all bf16 elements.
        if not torch.allclose(got, wanted, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6):
            return False
        if dtype == torch.bfloat16 and (got == wanted).float().mean() < 0.98:
            return False
    return True
