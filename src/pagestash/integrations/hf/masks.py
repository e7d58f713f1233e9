"""Attention masks, without a wait for the device.

A model of transformers that gets no `attention_mask` looks whether its positions are those of packed sequences. To
see the answer the host waits for the device, once in each forward, and launches nothing meanwhile. But a forward
that was given no positions counts them itself, and has packed nothing. For such calls an instance has a copy of its
class's `forward` that does not look. All others run the class's own.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.copies import copy_with
from pagestash.integrations.hf.report import Report, patched_already

MODELS, MASKS = "transformers.models.", "transformers.masking_utils"
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
        if why is not None:
            report.leave("masks", name, module, why)
            continue
        ours = copy_with(theirs, {each: _without_positions(maker) for each, maker in makers.items()})
        if ours is None:
            report.leave("masks", name, module, "its decorators do not say which function they call")
            continue
        report.replace("masks", name, module, "no wait for the device where it counts positions itself")
        report.put_forward(module, _by_positions(theirs, ours, list(inspect.signature(inner).parameters)[1:]))


def _makers(forward: Any) -> dict[str, Callable[..., Any]]:
    """The functions that make masks from positions, by the names by which `forward` finds them.

    None for code that is not transformers' own: it may make other positions than 0, 1, 2 and so on.
    """
    if not isinstance(forward, FunctionType) or not forward.__module__.startswith(MODELS):
        return {}
    names = forward.__code__.co_names
    if "arange" not in names or POSITIONS not in inspect.signature(forward).parameters:
        return {}
    found = {name: forward.__globals__.get(name) for name in names}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, FunctionType)
        and value.__module__ == MASKS
        and POSITIONS in inspect.signature(value).parameters
    }


def _without_positions(maker: Callable[..., Any]) -> Callable[..., Any]:
    def make_mask(*args: Any, **options: Any) -> Any:
        options.pop(POSITIONS, None)
        return maker(*args, **options)

    return make_mask


def _by_positions(
    theirs: Callable[..., Any], ours: Callable[..., Any], names: list[str]
) -> Callable[..., Any]:
    """`ours` where no positions are given, else `theirs`; a compiler gets theirs, which does not look there."""

    @wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(names, args)) | options
        counts = given.get(POSITIONS) is None and not torch.compiler.is_compiling()
        return (ours if counts else theirs)(self, *args, **options)

    forward.__module__ = __name__
    return forward
