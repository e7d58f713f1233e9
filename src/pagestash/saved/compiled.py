"""`torch.compile` beside a keeper: dynamo does not trace our functions, and we know which modules are compiled.

Dynamo looks at every Python function that is called while a compiled model runs code of its own. Our hooks are
called by torch from there. `hidden` and `hidden_here` tell it to run them as they are; nothing is wrapped, and
nothing of dynamo is imported. Where it compiles a module, it follows the module's hooks, which therefore return at
once when they are compiled: there is no graph break.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from pagestash.torch_internals import (
    COMPILED,
    break_graph_at,
    children_of,
    compiled_graphs,
    compiled_in_place,
    constant_when_compiled,
    dynamo_is_loaded,
    forget_compiled,
    never_compile,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def hidden(function: Function) -> Function:
    """Never compile `function`, nor anything that it calls."""
    never_compile(function.__code__, inside=True)
    return function


def hidden_here(function: Function) -> Function:
    """Never compile `function`. What it calls may be compiled, so that it can ask `compiling_around`."""
    never_compile(function.__code__, inside=False)
    return function


def run_as_it_is(why: str) -> Callable[[Function], Function]:
    """Break dynamo's graph at the function, and compile nothing in it. `why` is what `fullgraph` makes an error."""

    def run(function: Function) -> Function:
        break_graph_at(function, why)
        return hidden(function)

    return run


def at_compile_time(function: Function) -> Function:
    """Dynamo calls `function` once, while it compiles, and takes the result for a constant."""
    # As torch.compiler.assume_constant_result does, which would import two seconds' worth of dynamo.
    constant_when_compiled(function)
    return function


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is the wrapper that `torch.compile(module)` returns."""
    return COMPILED in children_of(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether it is such a wrapper, or `module.compile()` was called."""
    return compiled_in_place(module) or is_wrapper(module)


def compile_anew(modules: Iterable[nn.Module]) -> None:
    """Forget the compiled forwards of `modules`: dynamo does not notice that a module inside has got a hook."""
    if not dynamo_is_loaded():
        return
    codes: set[Any] = {
        getattr(getattr(type(module), "forward", None), "__code__", None) for module in modules
    }
    for code in codes - {None}:
        if compiled_graphs(code):
            forget_compiled(code)
