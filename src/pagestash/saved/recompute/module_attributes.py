"""Attributes of modules that a forward reads or counts in: `training`, other plain values, and what a forward sets.

A replay finds numbers, strings, flags and None as they were when the first forward began; what it sets is undone.
So it does with what a forward was seen to set, such as the state of a recurrent module. Tensors that require a
gradient are not held: they are results, and holding one would keep its graph alive. What is changed in place is not
noticed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Number
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from pagestash.saved.recompute.trees import PLAIN

_ABSENT = object()
_NOT_HELD = object()


@dataclass(slots=True, frozen=True)
class KnownAttributes:
    """Names of attributes that were plain values, or that a forward has set, in modules of one class."""

    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]] = field(compare=False)

    @classmethod
    def of(cls, names: Iterable[str]) -> "KnownAttributes":
        # Of more than one name, an itemgetter gives a tuple; every module has these two.
        names = tuple(dict.fromkeys(("training", "_is_full_backward_hook", *names)))
        return cls(names, itemgetter(*names))

    def read(self, own: dict[str, Any]) -> tuple[Any, ...]:
        try:
            return self.get(own)
        except KeyError:
            return tuple(own.get(name, _ABSENT) for name in self.names)

    def held(self, own: dict[str, Any]) -> tuple[Any, ...]:
        """Their values, where these can be held."""
        values = self.read(own)
        if PLAIN.issuperset(map(type, values)):
            return values
        return tuple([value if _is_held(value) else _NOT_HELD for value in values])


def _is_held(value: Any) -> bool:
    kind = type(value)
    if kind in PLAIN or value is _ABSENT:
        return True
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, tuple | list):
        return all(map(_is_held, value))
    return isinstance(value, Number | Enum)  # NumPy's numbers, too


AttributesOfClasses = dict[type, KnownAttributes]
"""Looking through all of a module's attributes takes 2 µs, reading the known ones a tenth of that. They are looked
through again whenever a region's values are checked."""


class ModuleAttributes:
    """Read before a region's first forward; `restored` for each replay."""

    def __init__(self, modules: Sequence[nn.Module], known: AttributesOfClasses, search: bool) -> None:
        """`search`: look for attributes that are not known yet, now and in `close`."""
        self._known = known
        self._all: list[tuple[type, dict[str, Any], dict[str, Any]]] = []
        """With `search`: of each module its class, its attributes, and what they were."""
        self._before: list[tuple[dict[str, Any], KnownAttributes, tuple[Any, ...]]] = []
        for module in modules:
            own = module.__dict__
            names = known.get(type(module))
            if names is None or search:
                found = [name for name, value in own.items() if type(value) in PLAIN]
                names = known[type(module)] = KnownAttributes.of((*(names.names if names else ()), *found))
            if search:
                self._all.append((type(module), own, dict(own)))
            self._before.append((own, names, names.held(own)))

    def close(self) -> None:
        """The forward is over: what it has set is an attribute to hold, in modules of that class."""
        if not self._all:
            return
        for kind, own, before in self._all:
            names = self._known[kind]
            new = [
                name
                for name in (*own, *(before.keys() - own.keys()))
                if own.get(name, _ABSENT) is not before.get(name, _ABSENT) and name not in names.names
            ]
            if new:
                self._known[kind] = KnownAttributes.of((*names.names, *new))
        for at, (kind, own, before) in enumerate(self._all):
            names = self._known[kind]
            if names is not self._before[at][1]:
                self._before[at] = own, names, names.held(before)
        self._all = []

    def restored(self) -> "_Restored":
        """As they were before the first forward; what the replay sets is undone."""
        return _Restored(self._before)


class _Restored:
    """The context of one replay. (A class, because a generator's context takes 2 µs.)"""

    def __init__(self, before: list[tuple[dict[str, Any], KnownAttributes, tuple[Any, ...]]]) -> None:
        self._before = before
        self._now = [plain.read(own) for own, plain, _ in before]

    def __enter__(self) -> None:
        for (own, plain, values), there in zip(self._before, self._now):
            if not all(map(is_, values, there)):
                for name, value in zip(plain.names, values):
                    if value is not _NOT_HELD:
                        _set(own, name, value)

    def __exit__(self, *error: object) -> None:
        for (own, plain, _), there in zip(self._before, self._now):
            if not all(map(is_, there, plain.read(own))):
                for name, value in zip(plain.names, there):
                    _set(own, name, value)


def _set(own: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        own.pop(name, None)
    else:
        own[name] = value
