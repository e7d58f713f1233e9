"""Patterns of region names: `layers.*.experts`, `layers.{0-5,8}.**`."""

import re
from collections.abc import Sequence
from functools import lru_cache

MOST_NUMBERS = 10_000
"""Of a range in a pattern."""


@lru_cache(maxsize=2**14)  # called in every forward, with the same names
def matches(pattern: str, name: str) -> bool:
    """Whether the pattern matches all of a dotted name."""
    return re.fullmatch(regular_expression(pattern), name) is not None


def regular_expression(pattern: str) -> str:
    """A pattern as a regular expression over a dotted name."""
    parts = re.split(r"(\*\*|\*|\{\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\})", pattern)
    meaning = {"**": ".*", "*": r"[^.]+"}
    return "".join(
        meaning.get(part) or (_numbers(part) if number % 2 else re.escape(part))
        for number, part in enumerate(parts)
    )


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text.

    >>> number_ranges([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[1]}" for part in parts)


def _numbers(text: str) -> str:
    """`{0-2,5}` as a regular expression."""
    found: list[int] = []
    for item in text[1:-1].split(","):
        first, _, last = item.partition("-")
        if int(last or first) - int(first) > MOST_NUMBERS:
            raise ValueError(f"rule match {text!r}: expected at most {MOST_NUMBERS} numbers in a range")
        found += range(int(first), int(last or first) + 1)
    return f"(?:{'|'.join(map(str, found))})" if found else r"(?!)"
