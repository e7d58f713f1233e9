"""Who is told how far measuring and planning are: a function, or a bar on a terminal."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, int, int], None]
"""Is told what runs, its number, and the total."""
Progress = Tell | bool | None
"""True draws a bar on stderr, if that is a terminal; False and None tell nobody."""


def tell_nobody(what: str, number: int, total: int) -> None:
    """Nobody asked."""


@contextmanager
def telling(progress: Progress) -> Iterator[Tell]:
    """Whom to tell inside."""
    if not isinstance(progress, bool):
        yield progress or tell_nobody
    elif not progress:
        yield tell_nobody
    else:
        random_state = random.getstate()  # which the import of rich draws from
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        random.setstate(random_state)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, number, total: bar.update(
                task, description=what, completed=number, total=total
            )
