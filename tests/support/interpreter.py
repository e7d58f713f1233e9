"""Triton's interpreter, made fit for a whole test suite: what it repeats for every call is done once."""

import functools
import inspect
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

Version = torch.torch_version.TorchVersion


def prepare() -> None:
    """Call it before the first kernel runs. Where triton is too old for a change, it is left as it is."""
    if Version(triton.__version__) < (3, 9) and Version(numpy.__version__) >= (2, 5):
        index_by_loaded_numbers()
    if hasattr(interpreter, "_LangPatchScope"):
        patch_the_language_once()
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)


def index_by_loaded_numbers() -> None:
    """Let the interpreter of triton before 3.9 loop over a loaded bound with numpy 2.5 or later.

    It calls `int` on an array of one element, which numpy no longer takes; 3.9 squeezes it first.
    """
    inner = interpreter._patch_lang_tensor

    def patch(tensor, *rest):
        inner(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch


def patch_the_language_once() -> None:
    """Look through `triton.language` once, and not at every launch and at every call of a device function.

    A launch replaces the language's functions by interpreted ones, and puts them back at its end. Finding them
    takes milliseconds, more than most of our kernels; they are the same each time, so they are remembered. A device
    function called within a launch finds them replaced already, unless it sees another module than its kernel
    (`tl.core`, as triton's own `sum` does): the interpreter replaces that module's once, and never puts them back.
    """
    inner, scope_of = interpreter._patch_lang, interpreter._LangPatchScope
    remembered: dict[frozenset, list[tuple[object, str, object]]] = {}
    running: list[frozenset] = []
    called: set[frozenset] = set()

    class Scope(scope_of):
        def restore(self) -> None:
            super().restore()
            running.pop()

    def launch(fn: Any, modules: frozenset) -> Any:
        if modules not in remembered:
            first = inner(fn)
            remembered[modules] = [(owner, name, getattr(owner, name)) for owner, name, _ in first._changes]
            first.restore()
        running.append(modules)
        scope = Scope()
        for owner, name, value in remembered[modules]:
            scope.set_attr(owner, name, value)
        return scope

    def patch(fn: Any) -> Any:
        modules = modules_of(fn)
        if not running:
            return launch(fn, modules)
        if not modules <= running[-1] and modules not in called:
            called.add(modules)
            inner(fn)
        return None  # of a device function's call, which nobody looks at

    interpreter._patch_lang = patch


@functools.cache
def modules_of(fn: Any) -> frozenset:
    """The modules of the language that a function sees."""
    seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return frozenset(module.__name__ for module in seen if module in (tl, tl.core))


def remembered(inner: Any) -> Any:
    """`inner` asked once for each scalar type: it writes down a table of all of them at each call."""
    of_scalar = functools.cache(inner)

    def find(kind: Any) -> Any:
        scalar = kind.element_ty if type(kind) is tl.block_type else kind
        return of_scalar(scalar) if type(scalar) is tl.dtype else inner(kind)

    return find
