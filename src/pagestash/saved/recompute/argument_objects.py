"""Arguments that are objects: a forward that changes one cannot be replayed on what it was given.

Tensors are held, and tuples, lists, dicts and dataclasses are rebuilt for each replay. Any other object is passed
as it is, so its content must be the same before forward, after it, and before the replay.
"""

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from pagestash.saved.recompute.trees import PLAIN_VALUES

_NOT_DATA = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_MOST_LEVELS, _MOST_VALUES = 5, 512


class _SameTensor:
    """Which tensor it was, at which version, without keeping it alive."""

    __slots__ = ("ref", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref, self.version = ref(tensor), 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameTensor) or self.version != other.version:
            return False
        mine = self.ref()
        return mine is not None and mine is other.ref()

    __hash__ = None  # type: ignore[assignment]


def may_change(leaf: Any) -> bool:
    """Whether a leaf that is no tensor is an object that a forward could change."""
    return type(leaf) not in PLAIN_VALUES and hasattr(leaf, "__dict__") and not isinstance(leaf, _NOT_DATA)


def _content(value: Any) -> Any:
    """What an object holds, to a depth of 5 and up to 512 values; compare it with `_unchanged`."""
    left = [_MOST_VALUES]

    def look(value: Any, depth: int) -> Any:
        left[0] -= 1
        if type(value) in PLAIN_VALUES:
            return value
        if isinstance(value, torch.Tensor):
            return _SameTensor(value)
        if depth == _MOST_LEVELS or left[0] < 0 or isinstance(value, _NOT_DATA):
            return None
        if isinstance(value, dict):
            return {key: look(item, depth + 1) for key, item in value.items() if type(key) in PLAIN_VALUES}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [len(value), *(look(item, depth + 1) for item in value)]
        if hasattr(value, "__dict__"):
            return (id(value), {key: look(item, depth + 1) for key, item in vars(value).items()})
        return None

    return look(value, 0)


def _unchanged(before: Any, after: Any) -> bool:
    """Whether nothing was replaced, added to or written.

    An attribute that was None or absent and is a plain value now is no change: the object has cached something.
    """
    if before is None and type(after) in PLAIN_VALUES:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):
        (mine, old), (other, new) = before, after
        return mine == other and all(key in new and _unchanged(value, new[key]) for key, value in old.items())
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            _unchanged(value, after[key]) for key, value in before.items()
        )
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_unchanged, before, after))
    return before is after or before == after


class ArgumentObjects:
    """The objects among a forward's arguments, and their content before it."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._seen: list[tuple[Any, Any]] = []

    def add(self, leaf: Any) -> None:
        if all(leaf is not each for each, _ in self._seen):
            self._seen.append((leaf, _content(leaf)))

    def close(self) -> None:
        """Forward is over: refuse if it has changed one."""
        self._check("changes its argument")

    def check(self) -> None:
        """Backward needs a replay: refuse if one was changed since forward."""
        self._check("has an argument that was changed between forward and backward,")

    def _check(self, how: str) -> None:
        for leaf, before in self._seen:
            if not _unchanged(before, _content(leaf)):
                kind = type(leaf).__name__
                helps = "pass what changes as a tensor, or give the region another home"
                if "cache" in kind.lower():
                    helps = "pass use_cache=False (or set model.config.use_cache = False) while training"
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and {how} a {kind}, so that its forward cannot "
                    f"be replayed on what it was given; {helps}"
                )
