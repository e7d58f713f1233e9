"""What commands print: as wide as the terminal, or as COLUMNS says. Imports no torch."""

import re
import shutil
import sys
import textwrap

PIPE = 160
"""Columns of a pipe, which has no width."""


def columns() -> int:
    return shutil.get_terminal_size((PIPE, 24)).columns


def show(found: object) -> None:
    """Print a report; lines that are too long go on below what comes after their label."""
    for line in str(found).splitlines():
        print(_wrapped(line, columns()))


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = re.match(r"\S+(?: \S+)?\s{2,}", line)
    indent = " " * (label.end() if label and label.end() < width // 3 else 0)
    return "\n".join(
        textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )
