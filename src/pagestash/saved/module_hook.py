"""Hooks of a keeper or a profile on a module, which are not copied with the module."""

from collections.abc import Callable
from typing import Any

import torch

from pagestash.saved.compiled import hidden


def nothing(*args: Any) -> None:
    """The hook of a copied module: does nothing."""


class Hook:
    """A forward hook that is left out of copies: a pickled or deep-copied module has `nothing` in its place."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Any:
    return nothing


class RunHook(Hook):
    """Calls a function with what the hook is given, but not inside of a compiled graph."""

    def __init__(self, run: Callable[..., object]) -> None:
        self._run = run

    @hidden
    def __call__(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():
            self._run(*given)
