"""Routers of any model decide once, also where the layer around them is recomputed.

A replay of a layer takes the first forward's logits, weights and ids (`ps.once`): tokens go to the experts that
they went to, whatever the kernels of a second forward would round to. What the router saved for backward stays.

A router is a module of a class `...Router`, or beside the experts a `gate` or `router` that is no linear layer
(HunYuan). Jamba's layer decides in a method of its own, from the logits of a linear layer.
"""

from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from pagestash.integrations.hf.experts import is_experts
from pagestash.integrations.hf.report import Report, patched_already
from pagestash.saved.names import ADAPTED
from pagestash.saved.recompute.once import once

NAMES = ("gate", "router")
METHOD = "route_tokens_to_experts"
"""By which transformers' layers decide that have no module for it."""
ONCE = "its choice is made once, also where its layer is recomputed"


def route_once(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Let each router among `modules`, with their names, run once."""
    modules = [each for each in modules if not hasattr(each[1], ADAPTED)]
    layers = {_parent(name) for name, module in modules if is_experts(module)}
    undecided = set(layers)
    for name, module in modules:
        if not _is_router(name, module, layers):
            continue
        undecided = {layer for layer in undecided if not _in_one_branch(layer, _parent(name))}
        why = patched_already(module)
        if why is not None:
            report.leave("router", name, module, why)
            continue
        report.put_forward(module, _forward_once)
        report.replace("router", name, module, ONCE)
    for name, module in modules:
        if _place(name) not in undecided:
            continue
        if METHOD in module.__dict__:
            report.leave("router", name, module, "optimised already")
        elif hasattr(type(module), METHOD):
            setattr(module, METHOD, MethodType(_method_once, module))
            report.on_undo(partial(delattr, module, METHOD))
            report.replace("router", name, module, ONCE)
        else:
            report.leave("router", name, module, "no router was found, so a recomputed layer chooses again")


def _place(name: str) -> str:
    """The name that a module would have without PEFT's adapters around it."""
    while name.endswith(f".{ADAPTED}"):
        name = name.removesuffix(f".{ADAPTED}")
    return name


def _parent(name: str) -> str:
    return _place(name).rpartition(".")[0]


def _in_one_branch(layer: str, other: str) -> bool:
    """Whether one of two modules is in the other: a router may stand beside its experts, deeper, or around them."""
    return f"{layer}.".startswith(f"{other}.") or f"{other}.".startswith(f"{layer}.")


def _is_router(name: str, module: nn.Module, layers: set[str]) -> bool:
    """Whether `module` chooses experts; `layers` are the modules that have experts in them."""
    kind = type(module).__name__
    beside = _parent(name) in layers and _place(name).rpartition(".")[2] in NAMES
    return "Router" in kind or (beside and not isinstance(module, nn.Linear) and kind != "Linear")


def _forward_once(self: Any, *args: Any, **options: Any) -> Any:
    """The class's `forward`, which is not replayed."""
    return once(lambda: type(self).forward(self, *args, **options))


def _method_once(self: Any, *args: Any, **options: Any) -> Any:
    return once(lambda: getattr(type(self), METHOD)(self, *args, **options))
