"""Copies of functions of transformers that find code of ours by the names by which their file has its own."""

import inspect
from types import CellType, FunctionType
from typing import Any


def copy_with(function: Any, ours: dict[str, Any]) -> Any:
    """A copy of `function`, a `forward`, that finds `ours` in the place of what its file has.

    Its decorators are around the copy as they are around it. None if one of them hides what it calls: one by
    `functools.wraps` has the function inside in its closure.
    """
    inner = inspect.unwrap(function)
    return _decorated(function, inner, _copy(inner, ours)) if isinstance(inner, FunctionType) else None


def _copy(function: Any, ours: dict[str, Any]) -> FunctionType:
    # A code object of its own: a compiler keeps what it compiled by code object.
    code = function.__code__.replace(co_name="forward")
    found = {**function.__globals__, **ours}
    del found["__name__"]  # by which a compiler would find the file, and what it has in the place of `ours`
    copy = FunctionType(code, found, "forward", function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__annotations__ = function.__annotations__
    copy.__module__ = __name__
    return copy


def _decorated(theirs: Any, inner: Any, ours: FunctionType) -> Any:
    """The decorators of `theirs` around `ours` in the place of `inner`; None if one of them hides what it calls."""
    if theirs is inner:
        return ours
    within = theirs.__wrapped__
    copied = _decorated(within, inner, ours)
    closure = theirs.__closure__ or () if isinstance(theirs, FunctionType) else ()
    if copied is None or sum(_holds(cell, within) for cell in closure) != 1:
        return None
    cells = tuple(CellType(copied) if _holds(cell, within) else cell for cell in closure)
    found = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__, cells)
    found.__kwdefaults__, found.__doc__ = theirs.__kwdefaults__, theirs.__doc__
    found.__dict__.update(theirs.__dict__ | {"__wrapped__": copied})
    return found


def _holds(cell: CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # it is empty
        return False
