"""What hangs on a module for a keeper's or a profile's sake, and stays behind when the module is copied."""

from typing import Any


def nothing(*args: Any) -> None:
    """In a copy of the module: no hook."""


class Hook:
    """A forward hook that is no part of the model: a pickled or deep-copied module has `nothing` in its place."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _no_hook, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing


def _no_hook() -> Any:
    return nothing
