"""`torch.compile` beside a keeper: dynamo does not trace our functions, and we know which modules are compiled.

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
    """Never compile `function`. What it calls may be compiled, so that it can ask `compiling_around`."""
    _skip(function, _frames._FrameAction.DEFAULT)
    return function


def run_as_it_is(function: Function) -> Function:
    """Break dynamo's graph at `function`, and compile nothing inside it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hidden(function)


def _skip(function: Callable[..., Any], inside: Any) -> None:
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, inside)
    _frames.set_code_exec_strategy(function.__code__, strategy)


compiling_around = _frames.get_eval_frame_callback
"""The callback that compiles functions called from here, or None. (Inside `hidden` functions: None.)"""


def at_compile_time(function: Function) -> Function:
    """Dynamo calls `function` once, while it compiles, and takes the result for a constant."""
    # As torch.compiler.assume_constant_result does, which would import two seconds' worth of dynamo.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is the wrapper that `torch.compile(module)` returns."""
    return "_orig_mod" in module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether it is such a wrapper, or `module.compile()` was called."""
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
