"""Names of a package that are imported on first use, so that its other modules load without torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, found_in: Mapping[str, str]) -> Callable[[str], Any]:
    """The package's `__getattr__`: `found_in` has the module of each name."""

    def find(name: str) -> Any:
        if name not in found_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(found_in[name]), name)

    return find
