"""What commands check before their work, and how they end. Imports no torch."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from pagestash.profiling.picture import check_suffix

WRONG_INPUT = 2


def exit_code(work: Callable[[], None]) -> int:
    """Do the work of a command. Bad input, and too little memory for the step, are one line on stderr."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_INPUT
    except (MemoryError, RuntimeError) as error:
        from pagestash.device import out_of_memory

        if not out_of_memory(error):
            raise
        print("error: too little memory for this step; try --layers, --batch or --seq", file=sys.stderr)
        return WRONG_INPUT
    return 0


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{option} {path}: expected a file in a folder that exists")


def check_picture(option: str, path: Path | None) -> None:
    """Refuse a picture that could not be drawn, before the work."""
    if path is None:
        return
    check_file(option, path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install 'pagestash[plot]'")
    check_suffix(option, path)


def check_numbers(**numbers: int | None) -> None:
    """Refuse a number below 1, named as its option."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected at least 1")
