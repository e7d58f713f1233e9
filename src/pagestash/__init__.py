"""pagestash: activation memory for Mixture-of-Experts training.

The names below are imported on first use, so that `pagestash.jax` never loads torch and the command line
answers `--help` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES_OF_NAMES: dict[str, str] = {}

__all__ = ["__version__", *_HOMES_OF_NAMES]


def __getattr__(name: str) -> Any:
    try:
        module = _HOMES_OF_NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
