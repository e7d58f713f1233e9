"""What a function refers to: in its closure, in the globals it names, in the object it is a method of."""

import dis
import functools
import io
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

MOST = 10_000
"""Most values to visit, which bounds the time for large structures."""


def reached(function: Any) -> dict[str, Any]:
    """The values that calling `function` may use, by the names it has for them.

    The search follows Python functions and methods, and enters lists, tuples and dicts. Of objects it visits only
    the attributes that a method names of its own object.
    """
    found: dict[str, Any] = {}
    waiting = [("train_step", function)]
    seen: dict[Any, Any] = {}
    while waiting and len(seen) < MOST:
        name, value = waiting.pop()
        # Every access to a bound method creates a new object.
        key = (id(value.__func__), id(value.__self__)) if isinstance(value, MethodType) else id(value)
        if key in seen:
            continue
        seen[key] = value  # keeps it alive, so that no other object gets its id
        while name in found:
            name += "'"
        found[name] = value
        waiting += _parts(name, value)
    return found


def iterators(found: dict[str, Any]) -> list[str]:
    """The names of the iterators among them."""
    return [
        name
        for name, value in found.items()
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase)
    ]


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        return [(name, value.func), *_parts(name, list(value.args)), *_parts(name, value.keywords)]
    if isinstance(value, MethodType):
        return [(name, value.__func__), *_of_object(value.__func__, value.__self__)]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [(name, item) for item in value]
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", item) for key, item in value.items()]
    return []


def _of_object(function: Any, owner: Any) -> list[tuple[str, Any]]:
    """The attributes and methods that a method names of its own object."""
    if not isinstance(function, FunctionType) or not hasattr(owner, "__dict__") or isinstance(owner, type):
        return []
    parts: list[tuple[str, Any]] = []
    for name in {name for code in _codes(function.__code__) for name in code.co_names}:
        if name in owner.__dict__:
            parts.append((name, owner.__dict__[name]))
        elif isinstance(method := vars(type(owner)).get(name), FunctionType):
            parts.append((name, MethodType(method, owner)))
    return parts


def _of_function(function: FunctionType) -> list[tuple[str, Any]]:
    if (function.__module__ or "").split(".")[0] in ("torch", "pagestash", "numpy"):
        return []
    parts = [(function.__name__, item) for item in function.__defaults__ or ()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            parts.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    names = {name for code in _codes(function.__code__) for name in _globals_of(code)}
    parts += [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]
    return parts


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals_of(code: CodeType) -> Iterator[str]:
    # By instruction, because an attribute may have the name of a global.
    return (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
