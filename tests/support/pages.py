"""The examples of a page of the documentation, as they are printed there."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}


def blocks(page: str, kind: str = "python") -> Iterator[tuple[int, str]]:
    """The page's examples, with where they begin in it."""
    text = PAGES[page].read_text()
    for found in re.finditer(rf"^```{kind}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield text[: found.start(1)].count("\n"), found[1]


def run(
    page: str,
    names: dict[str, Any] | None = None,
    begin: Callable[[int, dict[str, Any]], None] = lambda number, names: None,
) -> tuple[list[str], dict[str, Any]]:
    """Run the page's examples one after the other, in one namespace; what they printed, and the namespace.

    `begin(number, names)` comes before each, to make what a page takes for granted.
    """
    names = {} if names is None else names
    printed = []
    for number, (line, text) in enumerate(blocks(page)):
        begin(number, names)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * line + text, PAGES[page], "exec"), names)
        printed.append(out.getvalue())
    return printed, names
