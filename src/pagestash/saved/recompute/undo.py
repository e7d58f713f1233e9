"""What a replay undoes when it is over. (An `ExitStack` takes ten times as long.)"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

Undo = list[Callable[[], object]]
"""What is to be called, the last first."""


def enter(context: AbstractContextManager[Any], undo: Undo) -> None:
    """Enter a context, and leave it in the end."""
    context.__enter__()
    undo.append(partial(context.__exit__, None, None, None))


def undo_all(undo: Undo) -> None:
    while undo:
        undo.pop()()
