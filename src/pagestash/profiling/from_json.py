"""Records of a profile or a plan from JSON: every field has its type, or the error names it."""

import json
import math
import tomllib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pagestash.policy import Policy

SIGNED = {"end_bytes", "peak_bytes", "beside_bytes", "saved_bytes"}
"""The only numbers that may be below 0: memory relative to the start of a step, and what a home saves."""

Record = TypeVar("Record")


def load(path: str | Path, what: str, version: int, make: Callable[[dict[str, Any]], Record]) -> Record:
    """What `make` makes of a file that has a `format`; errors name the file. `what` it is, in words."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # bytes that are no text, too
        raise ValueError(f"{path}: this is no JSON ({error})") from error
    if not isinstance(data, dict) or data.pop("format", None) != version:
        raise ValueError(f"{path}: this is no {what} that this version can read")
    try:
        return make(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(kind: type[Record], item: Any, where: str, *, leave: str = "") -> Record:
    """A dataclass from a dict of its fields; those with a default may be missing, and `leave` is left out."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{where}: expected its fields by name, found {_short(item)}")
    hints = _hints(cast(Hashable, kind))
    unknown = item.keys() - hints.keys() - {leave}
    if unknown:
        raise ValueError(f"{where} has an unknown field {min(unknown)!r}")
    values = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name in item:
            values[each.name] = convert(hints[each.name], item[each.name], f"{where}.{each.name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{where} has no {each.name!r}")
    return kind(**values)


def read_list(kind: type[Record], items: Any, where: str, *, leave: str = "") -> list[Record]:
    if not isinstance(items, list):
        raise ValueError(f"{where}: expected a list, found {_short(items)}")
    return [read(kind, item, f"{where}[{at}]", leave=leave) for at, item in enumerate(items)]


def convert(kind: Any, value: Any, where: str) -> Any:
    """The value as a field of this type has it: lists become tuples."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (kind,) = (each for each in inner if each is not NoneType)
        return convert(kind, value, where)
    if origin is None:
        return _plain(kind, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple([convert(own, each, where) for own, each in zip(kinds, value)])
    elif origin in (Sequence, frozenset) and isinstance(value, list):
        found = [convert(inner[0], each, where) for each in value]
        return found if origin is Sequence else frozenset(found)
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {name: convert(inner[1], each, f"{where}.{name}") for name, each in value.items()}
    elif origin is Literal:
        if value in inner:
            return value
        raise ValueError(f"{where}: expected one of {', '.join(inner)}, found {_short(value)}")
    raise _unexpected(kind, value, where)


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is Policy and type(value) is str:
        return Policy.from_dict(tomllib.loads(value))
    if is_dataclass(kind):
        return read(kind, value, where)  # type: ignore[arg-type]
    if kind in (str, bool) and type(value) is kind:
        return value
    if kind in (int, float) and (type(value) is int or (type(value) is kind and math.isfinite(value))):
        if value >= 0 or where.rpartition(".")[2] in SIGNED:
            return value
        raise ValueError(f"{where}={value}: expected 0 or more")
    raise _unexpected(kind, value, where)


def _unexpected(kind: Any, value: Any, where: str) -> ValueError:
    return ValueError(f"{where}: expected {_words(kind)}, found {_short(value)}")


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _words(kind: Any) -> str:
    if get_origin(kind) in (Sequence, frozenset):
        return "a list"
    if get_origin(kind) is tuple:
        return "a list" if get_args(kind)[-1] is Ellipsis else f"a list of {len(get_args(kind))}"
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}.get(
        kind, "an object"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
