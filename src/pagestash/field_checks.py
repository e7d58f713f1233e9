"""Checks of what a user sets: each returns the value, or raises a `ValueError` that begins with its name."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from pagestash.sizes import parse_bytes

Check = Callable[[Any, str], Any]
"""Of a value and its name; returns the value to store."""


def one_of(*choices: str) -> Check:
    def check(value: Any, what: str) -> str:
        if isinstance(value, str) and value in choices:
            return value
        hint = get_close_matches(str(value), choices, n=1)
        meant = f"; did you mean {hint[0]!r}?" if hint else ""
        raise ValueError(f"{what}={value!r} is none of {', '.join(choices)}{meant}")

    return check


def number_from(low: float, high: float) -> Check:
    def check(value: Any, what: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise ValueError(f"{what}={value!r}: expected a number from {low:g} to {high:g}")
        return float(value)

    return check


def number_from_or_none(low: float, high: float) -> Check:
    check = number_from(low, high)
    return lambda value, what: None if value is None else check(value, what)


def bytes_or(other: str | None) -> Check:
    def check(value: Any, what: str) -> Any:
        is_other = value is None if other is None else isinstance(value, str) and value == other
        return value if is_other else parse_bytes(value, what)

    return check


def check_fields(target: Any, checks: Mapping[str, Check], where: str) -> None:
    """Check each field of a frozen dataclass, and store what its check returns."""
    for name, check in checks.items():
        object.__setattr__(target, name, check(getattr(target, name), f"{where} {name}"))


def check_keys(data: Any, expected: set[str], where: str) -> None:
    """Check that a table of a file has no keys but these; not all need be there."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: {data!r} is not a table; expected {', '.join(sorted(expected))}")
    for key in data:
        if key not in expected:
            hint = get_close_matches(str(key), expected, n=1)
            meant = f"; did you mean {hint[0]!r}?" if hint else f"; expected {', '.join(sorted(expected))}"
            raise ValueError(f"{where}: unknown key {key!r}{meant}")
