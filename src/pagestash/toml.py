"""Read TOML files, with errors of one sentence."""

import tomllib
from pathlib import Path
from typing import Any


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; if it cannot be read, a `ValueError` that begins with the path."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no UTF-8 text (byte {error.start})") from error
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
