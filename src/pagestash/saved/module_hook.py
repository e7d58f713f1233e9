"""Hooks of a keeper or a profile on a module, which are not copied with the module."""

from typing import Any


def nothing(*args: Any) -> None:
    """The hook of a copied module: does nothing."""


class Hook:
    """A forward hook that is left out of copies: a pickled or deep-copied module has `nothing` in its place."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _no_hook, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing


def _no_hook() -> Any:
    return nothing
