"""Attention masks, without a wait for the device.

A model of transformers that gets no `attention_mask` looks whether its positions are those of packed sequences. To
see the answer the host waits for the device, once in each forward, and launches nothing meanwhile. But a forward
that was given no positions counts them itself, and has packed nothing. An instance gets a copy of its class's
`forward`, which does not look then. With positions or a mask that it is given, all is as before.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.copies import copy_with
from pagestash.integrations.hf.report import Report, patched_already

MASKS = "transformers.masking_utils"
POSITIONS = "position_ids"


def replace_masks(modules: list[tuple[str, nn.Module]], report: Report) -> None:
    """Let those of `modules` that make masks do so without a wait, where they make the positions, too."""
    for name, module in modules:
        theirs: Any = type(module).forward
        inner: Any = inspect.unwrap(theirs) if isinstance(theirs, FunctionType) else None
        makers = _makers(inner)
        if not makers:
            continue
        why = patched_already(module)
        counts: ContextVar[bool] = ContextVar("counts", default=False)
        found = copy_with(inner, {each: _without_look(maker, counts) for each, maker in makers.items()})
        ours = _decorated(theirs, inner, found)
        if why is None and ours is None:
            why = "its decorators do not say which function they call"
        if why is not None or ours is None:
            report.leave("masks", name, module, why or "")
            continue
        report.replace("masks", name, module, "no wait for the device where it counts positions itself")
        report.put_forward(module, _noting(ours, list(inspect.signature(inner).parameters)[1:], counts))


def _makers(forward: Any) -> dict[str, Callable[..., Any]]:
    """The functions that make masks from positions, by the names by which `forward` finds them."""
    if not isinstance(forward, FunctionType) or POSITIONS not in inspect.signature(forward).parameters:
        return {}
    found = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, FunctionType)
        and value.__module__ == MASKS
        and POSITIONS in inspect.signature(value).parameters
    }


def _without_look(maker: Callable[..., Any], counts: ContextVar[bool]) -> Callable[..., Any]:
    def make_mask(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and POSITIONS in options and counts.get():
            options[POSITIONS] = None
        return maker(*args, **options)

    return make_mask


def _noting(ours: Callable[..., Any], names: list[str], counts: ContextVar[bool]) -> FunctionType:
    """`ours`, which notes for its masks whether it is given no positions."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return ours(self, *args, **options)
        given = dict(zip(names, args)) | options
        before = counts.set(given.get(POSITIONS) is None)
        try:
            return ours(self, *args, **options)
        finally:
            counts.reset(before)

    return forward  # type: ignore[return-value]


def _decorated(theirs: Any, inner: Any, ours: FunctionType) -> Any:
    """The decorators of `theirs` around `ours` in the place of `inner`; None if one of them hides what it calls."""
    if theirs is inner:
        return ours
    within = theirs.__wrapped__
    copied = _decorated(within, inner, ours)
    closure = theirs.__closure__ or () if isinstance(theirs, FunctionType) else ()
    if copied is None or sum(cell.cell_contents is within for cell in closure) != 1:
        return None
    cells = tuple(CellType(copied) if cell.cell_contents is within else cell for cell in closure)
    found = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__, cells)
    found.__kwdefaults__, found.__doc__ = theirs.__kwdefaults__, theirs.__doc__
    found.__dict__.update(theirs.__dict__ | {"__wrapped__": copied})
    return found
