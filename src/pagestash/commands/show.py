"""What commands print: as wide as the terminal, or as COLUMNS says. Imports no torch."""

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

PIPE = 160
"""Columns of a pipe, which has no width."""


def columns() -> int:
    return shutil.get_terminal_size((PIPE, 24)).columns


def show(found: object) -> None:
    """Print a report; lines that are too long go on below what comes after their label."""
    for line in str(found).splitlines():
        print(_wrapped(line, columns()))


def note(text: str) -> None:
    print(_wrapped(f"note: {text}", columns()), file=sys.stderr)


def continued(flags: Sequence[str], width: int = 78) -> str:
    """The flags of a command, with a backslash at the end of each line but the last: they can be pasted."""
    lines = [flags[0]]
    for flag in flags[1:]:
        if len(lines[-1]) + 1 + len(flag) > width:
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return " \\\n".join(lines)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = re.match(r"\S+(?: \S+)?\s{2,}", line)
    indent = " " * (label.end() if label and label.end() < width // 3 else 0)
    return "\n".join(
        textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )
