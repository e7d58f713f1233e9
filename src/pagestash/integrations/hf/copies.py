"""Copies of functions of transformers that find code of ours by the names by which their file has its own."""

from types import FunctionType
from typing import Any


def copy_with(function: Any, ours: dict[str, Any]) -> FunctionType:
    """A copy of `function`, a `forward`, that finds `ours` in the place of what its file has."""
    # A code object of its own: a compiler keeps what it compiled by code object.
    code = function.__code__.replace(co_name="forward")
    found = {**function.__globals__, **ours}
    del found["__name__"]  # by which a compiler would find the file, and what it has in the place of `ours`
    copy = FunctionType(code, found, "forward", function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__annotations__ = function.__annotations__
    copy.__module__ = __name__
    return copy
