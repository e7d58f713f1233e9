"""`torch.compile` beside a keeper: our own functions stay out of its sight, and its modules are known.

Dynamo looks at every Python function that is called while a compiled model runs code of its own. Our hooks are
called by torch from there. `hidden` and `hidden_here` tell it to run them as they are; nothing is wrapped, and
nothing of dynamo is imported. Where it compiles a module, it follows the module's hooks, which therefore return at
once when they are compiled: there is no graph break.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

_frames = torch._C._dynamo.eval_frame


def hidden(function: Function) -> Function:
    """Never compile `function`, nor anything that it calls."""
    _skip(function, _frames._FrameAction.SKIP)
    return function


def hidden_here(function: Function) -> Function:
    """Never compile `function`; what it calls is looked at as before, so that it can ask `compiling_around`."""
    _skip(function, _frames._FrameAction.DEFAULT)
    return function


def run_as_it_is(function: Function) -> Function:
    """Where dynamo meets `function`, its graph ends, and begins anew behind it: nothing inside can be compiled."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hidden(function)


def _skip(function: Callable[..., Any], inside: Any) -> None:
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, inside)
    _frames.set_code_exec_strategy(function.__code__, strategy)


compiling_around = _frames.get_eval_frame_callback
"""What compiles the functions that are called from here, or None. (Inside `hidden` functions: None.)"""


def at_compile_time(function: Function) -> Function:
    """Where dynamo meets `function`, it calls it once, while it compiles, and takes the result for a constant."""
    # All that torch.compiler.assume_constant_result does, but for two seconds of imports.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_wrapper(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, around another."""
    return "_orig_mod" in module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, or `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None or is_wrapper(module)


def compile_anew(modules: Iterable[nn.Module]) -> None:
    """Forget the compiled forwards of `modules`: dynamo does not notice that a module inside has got a hook."""
    if "torch._dynamo" not in sys.modules:
        return
    codes: set[Any] = {
        getattr(getattr(type(module), "forward", None), "__code__", None) for module in modules
    }
    for code in codes - {None}:
        if _frames._debug_get_cache_entry_list(code):
            _frames.reset_code(code)
