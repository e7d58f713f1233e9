"""Attention modules of any model: our rotary kernel, and a `core_attn` inside that rules can name.

The `forward` of an attention module calls functions of its file by name: `apply_rotary_pos_emb` or the like, and
the attention function that a registry gives it. An instance gets a copy of that `forward` which finds ours by the
same names; the class and the file stay as they are. `core_attn` is a module without parameters that runs the
function the registry gave, so that what queries, keys and values leave behind falls under its rule.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pagestash.integrations.hf.copies import copy_with
from pagestash.integrations.hf.report import Ran, Report, patched_already
from pagestash.integrations.hf.rotary import rotary_by_kernel
from pagestash.saved.streams import capturing

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
CORE = "core_attn"


class CoreAttention(nn.Module):
    """Runs the attention function of the module it is in.

    In eager mode transformers passes no mask where a plain causal one is meant, and the fast kernels run. While a
    CUDA graph is captured it makes the whole mask instead. Where the last eager call, of the same shapes, had none,
    the captured one gets none either: what was measured is what is captured.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self._attention = (attention,)  # in a tuple, where it is no child
        self.function: Callable[..., Any] | None = None
        self._without_mask: tuple[torch.Size, torch.Size] | None = None
        """The shapes of queries and keys of the last eager call, if it had no mask."""

    def ran(self) -> bool:
        return self.function is not None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        assert self.function is not None
        if not torch.compiler.is_compiling():
            shapes = query.shape, key.shape
            if not capturing():
                # (Not by setattr, which of a module takes microseconds.)
                self.__dict__["_without_mask"] = shapes if attention_mask is None else None
            elif shapes == self._without_mask:
                attention_mask = None
        return self.function(self._attention[0], query, key, value, attention_mask, **options)


def refuse_padding_in_graphs(model: nn.Module, report: Report) -> None:
    """Let `model` raise where it is captured with a padding mask, whose bits would decide what is captured."""
    handle = model.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    report.on_undo(handle.remove)


def _refuse_padding(model: Any, args: Any, options: dict[str, Any]) -> None:
    mask = options.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and capturing():
        raise RuntimeError(
            "attention_mask is a padding mask, and a CUDA graph is being captured: whether a mask is needed "
            "depends on the batch, and the graph does not; pass sequences without padding and no attention_mask"
        )


def replace_attention(
    modules: list[tuple[str, nn.Module]], report: Report, *, rope: bool, core: bool
) -> None:
    """Give the attention modules among `modules` our rotary kernel (`rope`) and a `core_attn` (`core`)."""
    rotaries: dict[Any, tuple[dict[str, Any] | str, Ran]] = {}
    for name, module in modules:
        globals_used = _globals_of(type(module))
        rotates = rope and any(_is_rotary(each) for each in globals_used)
        has_core = core and REGISTRY in globals_used and "get_interface" in _names_of(type(module))
        if not rotates and not has_core:
            continue
        parts = [part for part, on in (("rope", rotates), ("attention", has_core)) if on]
        if core and (better := _better(module)) is not None:
            report.leave("attention", name, module, better)
        why = patched_already(module)
        if why is not None:
            for part in parts:
                report.leave(part, name, module, why)
            continue
        if copy_with(type(module).forward, {}) is None:
            for part in parts:
                report.leave(part, name, module, "its decorators do not say which function they call")
            continue
        ours = _take_rotary(name, module, rotaries, report) if rotates else {}
        if has_core:
            ours[REGISTRY] = _Registry(globals_used[REGISTRY])
            core_attn = CoreAttention(module)
            module.add_module(CORE, core_attn)
            report.on_undo(partial(delattr, module, CORE))
            report.replace("attention", name, module, f"a {CORE} that rules can name", core_attn.ran)
        if ours:
            report.put_forward(module, copy_with(type(module).forward, ours))


def _take_rotary(
    name: str, module: nn.Module, known: dict[Any, tuple[dict[str, Any] | str, Ran]], report: Report
) -> dict[str, Any]:
    """Our rotary functions by the names of those that the module's file has; `known` are those of other classes."""
    kind = type(module)
    if kind not in known:
        theirs = {each: value for each, value in _globals_of(kind).items() if _is_rotary(each)}
        ran = Ran()
        known[kind] = rotary_by_kernel(theirs, ran), ran
    found, ran = known[kind]
    if isinstance(found, str):
        report.leave("rope", name, module, found)
        return {}
    report.replace("rope", name, module, "the RoPE kernel", ran)
    return dict(found)


def _better(module: Any) -> str | None:
    """Which implementation of its attention a model should run; None: the one it has."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    sinks = getattr(module, "sinks", None)
    if chosen != "eager" or sinks is None or not sinks.is_cuda:
        return None
    return (
        "attn_implementation is 'eager', which keeps matrices of sequence × sequence; "
        "model.set_attn_implementation('flex_attention') has one kernel for attention with sinks"
    )


def _names_of(kind: type) -> tuple[str, ...]:
    forward = inspect.unwrap(getattr(kind, "forward", None))  # type: ignore[arg-type]
    return forward.__code__.co_names if isinstance(forward, FunctionType) else ()


def _globals_of(kind: type) -> dict[str, Any]:
    """What the class's `forward` may find in its file, by name."""
    forward: Any = inspect.unwrap(getattr(kind, "forward", None))  # type: ignore[arg-type]
    return {name: forward.__globals__[name] for name in _names_of(kind) if name in forward.__globals__}


def _is_rotary(name: str) -> bool:
    return name.startswith("apply_") and "rotary" in name


class _Registry:
    """The registry of attention functions, whose functions run inside the module's `core_attn`."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def get_interface(self, *arguments: Any) -> Callable[..., Any]:
        return partial(_through_core, self._theirs.get_interface(*arguments))


def _through_core(function: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
    core = module.core_attn
    if core.function is not function:  # setting an attribute of a module takes microseconds
        core.function = function
    return core(*args, **options)
