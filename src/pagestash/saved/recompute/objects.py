"""Arguments that are objects: a forward that changes one cannot be replayed on what it was given.

Tensors are held, and tuples, lists, dicts and dataclasses are rebuilt for each replay. Any other object is passed
as it is, so its content must be the same before forward, after it, and before the replay.
"""

import pickle
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from pagestash.saved.recompute.rng import is_generator
from pagestash.saved.recompute.trees import PLAIN_VALUES

_NOT_DATA = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_MOST_LEVELS, _MOST_VALUES = 5, 512

Place = tuple[Any, ...]
"""The attributes, keys and indices that lead to a value."""


def may_change(leaf: Any) -> bool:
    """Whether a leaf that is no tensor is an object that a forward could change."""
    if type(leaf) in PLAIN_VALUES or isinstance(leaf, _NOT_DATA):
        return False
    return (
        hasattr(leaf, "__dict__")
        or isinstance(leaf, set)
        or hasattr(type(leaf), "__next__")
        or hasattr(type(leaf), "tobytes")
        or is_generator(leaf)
    )


class ArgumentObjects:
    """The objects among a forward's arguments, and their content before it."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._seen: list[tuple[Any, dict[Place, Any]]] = []

    def add(self, leaf: Any) -> None:
        if hasattr(type(leaf), "__next__"):
            raise RuntimeError(
                f"region {self._region!r} is under recompute, and takes a {type(leaf).__name__}, of which "
                "its forward and a replay would take different items; pass a list, or give the region another home"
            )
        if all(leaf is not each for each, _ in self._seen):
            self._seen.append((leaf, _content(leaf)))

    def check(self, *, forward: bool = False) -> None:
        """Refuse if one was changed: in the forward that is just over, or else since then."""
        for number, (leaf, before) in enumerate(self._seen):
            now = _content(leaf)
            if forward and _has(now, before):
                self._seen[number] = leaf, now  # with what forward has made it remember
            elif not _has(now, before, strictly=not forward):
                how = (
                    "changes its argument"
                    if forward
                    else "has an argument that was changed between forward and backward,"
                )
                kind = type(leaf).__name__
                helps = "pass what changes as a tensor, or give the region another home"
                if "cache" in kind.lower():
                    helps = "pass use_cache=False (or set model.config.use_cache = False) while training"
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and {how} a {kind}, so that its forward cannot "
                    f"be replayed on what it was given; {helps}"
                )


def _content(value: Any) -> dict[Place, Any]:
    """What an object holds, to a depth of 5 and up to 512 values."""
    found: dict[Place, Any] = {}

    def look(value: Any, at: Place) -> None:
        if type(value) in PLAIN_VALUES:
            found[at] = value
        elif isinstance(value, torch.Tensor):
            # (There is one reference to a tensor as long as it lives.)
            found[at] = ref(value), 0 if value.is_inference() else value._version
        elif hasattr(type(value), "tobytes"):  # an array of NumPy's
            found[at] = value.tobytes()
        elif is_generator(value):
            found[at] = pickle.dumps(value)
        elif len(at) < _MOST_LEVELS and len(found) < _MOST_VALUES and not isinstance(value, _NOT_DATA):
            items: Any = ()
            if isinstance(value, dict):
                items = [(key, item) for key, item in value.items() if type(key) in PLAIN_VALUES]
            elif isinstance(value, (list, tuple, set, frozenset)):
                items = enumerate(value)
            elif hasattr(value, "__dict__"):
                items = vars(value).items()
                found[*at, "identity"] = id(value)
            if isinstance(value, (dict, list, set)):
                found[*at, "length"] = len(value)
            for key, item in items:
                look(item, (*at, key))

    look(value, ())
    return found


def _has(now: dict[Place, Any], before: dict[Place, Any], *, strictly: bool = False) -> bool:
    """Whether all is there that was before, and is the same.

    If not `strictly`, what was None may be a plain value: the object has remembered something.
    """
    return all(
        at in now
        and (_same(value, now[at]) or (not strictly and value is None and type(now[at]) in PLAIN_VALUES))
        for at, value in before.items()
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):  # of tensors
        return one[0] is other[0] and one[1] == other[1]
    return type(one) is type(other) and one == other
