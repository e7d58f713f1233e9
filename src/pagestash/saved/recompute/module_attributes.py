"""Attributes of modules that a forward reads or counts in: `training`, other plain values, and what a forward sets.

A replay finds numbers, strings, flags and None as they were when the first forward began; what it sets is undone.
The same holds for attributes that a checked forward has set, such as the state of a recurrent module, if they are
tensors without a gradient, or short tuples and lists of such values. They are held until backward. What requires a
gradient is not: it is a result, and holding it would keep its graph alive. Other objects are not held, and nothing
tells of what is changed in place.

What a forward sets inside of `once` is set again where a replay comes to that call.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Number
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from pagestash.saved.recompute.trees import PLAIN

DEEP, LONG = 4, 64
"""Of tuples and lists that are held: so many in each other, and so many values in one."""
_NUMBERS = (Number, Enum)  # NumPy's numbers, too
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


def _is_held(value: Any, deep: int = 0) -> bool:
    kind = type(value)
    if kind in PLAIN or value is _ABSENT:
        return True
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if kind is tuple or kind is list:
        return deep < DEEP and len(value) <= LONG and all(_is_held(each, deep + 1) for each in value)
    return isinstance(value, _NUMBERS)


AttributesOfClasses = dict[type, KnownAttributes]
"""Looking through all of a module's attributes takes 2 µs, reading the known ones a tenth of that. They are looked
through again whenever a region's values are checked."""

SetAttribute = tuple[dict[str, Any], str, Any]
"""The attributes of a module, the name of one, and its value."""


class _Snapshot:
    """All attributes of a module at one time: which objects they are, and those that can be held."""

    def __init__(self, own: dict[str, Any]) -> None:
        self._ids = {name: id(value) for name, value in own.items()}
        self._held = {name: value for name, value in own.items() if _is_held(value)}

    def changed(self, own: dict[str, Any]) -> list[str]:
        """Names of attributes that are others by now."""
        gone = [name for name in self._ids if name not in own]
        return [name for name, value in own.items() if self._ids.get(name) != id(value)] + gone

    def values(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(self._held.get(name, _NOT_HELD if name in self._ids else _ABSENT) for name in names)


class _Before(NamedTuple):
    """A module's attributes, and the known ones of them as they were before forward."""

    own: dict[str, Any]
    known: KnownAttributes
    values: tuple[Any, ...]


class ModuleAttributes:
    """Read before a region's first forward; `restored` for each replay."""

    def __init__(self, modules: Sequence[nn.Module], known: AttributesOfClasses, search: bool) -> None:
        """`search`: look for attributes that are not known yet, now and in `close`."""
        self._known = known
        self._kinds = [type(module) for module in modules] if search else []
        self._snapshots = [_Snapshot(module.__dict__) for module in modules] if search else []
        self._left: set[tuple[int, str]] = set()
        """Attributes that a replay finds as they are then: the module's (`id` of its attributes), and the name."""
        self._before: list[_Before] = []
        for module in modules:
            own = module.__dict__
            names = known.get(type(module))
            if names is None or search:
                found = [name for name, value in own.items() if type(value) in PLAIN]
                names = known[type(module)] = KnownAttributes.of((*(names.names if names else ()), *found))
            self._before.append(_Before(own, names, names.held(own)))

    def close(self) -> None:
        """The forward is over: what it has set is an attribute to hold, in modules of that class."""
        for kind, before, snapshot in zip(self._kinds, self._before, self._snapshots):
            new = [name for name in snapshot.changed(before.own) if not _is_registered(before.own, name)]
            known = self._known[kind]
            if not set(new) <= set(known.names):
                self._known[kind] = KnownAttributes.of((*known.names, *new))
        for at, (kind, snapshot) in enumerate(zip(self._kinds, self._snapshots)):
            known, before = self._known[kind], self._before[at]
            if known is not before.known:
                self._before[at] = _Before(before.own, known, snapshot.values(known.names))
        self._kinds, self._snapshots = [], []

    def set_by(self, call: Callable[[], Any]) -> tuple[Any, list[SetAttribute]]:
        """The result of `call`, which no replay repeats, and the attributes that it set."""
        search = bool(self._snapshots)
        then: list[Any] = [
            _Snapshot(before.own) if search else before.known.read(before.own) for before in self._before
        ]
        result = call()
        found: list[SetAttribute] = []
        for before, old in zip(self._before, then):
            own, known = before.own, before.known
            if search:
                names = old.changed(own)
            else:
                names = [name for name, was, now in zip(known.names, old, known.read(own)) if was is not now]
            for name in names:
                value = own.get(name, _ABSENT)
                if _is_held(value):
                    found.append((own, name, value))
                else:
                    self._left.add((id(own), name))
        return result, found

    def restored(self) -> "_Restored":
        """As they were before the first forward; what the replay sets is undone."""
        return _Restored(self._before, self._left)


class _Restored:
    """The context of one replay. (A class, because a generator's context takes 2 µs.)"""

    def __init__(self, before: list[_Before], left: set[tuple[int, str]]) -> None:
        self._before, self._left = before, left
        self._now = [known.read(own) for own, known, _ in before]

    def __enter__(self) -> None:
        for (own, known, values), there in zip(self._before, self._now):
            if not all(map(is_, values, there)):
                for name, value in zip(known.names, values):
                    if value is not _NOT_HELD and not self._is_left(own, name):
                        set_attribute(own, name, value)

    def _is_left(self, own: dict[str, Any], name: str) -> bool:
        return (id(own), name) in self._left or _is_registered(own, name)

    def __exit__(self, *error: object) -> None:
        for (own, known, _), there in zip(self._before, self._now):
            if not all(map(is_, there, known.read(own))):
                for name, value in zip(known.names, there):
                    set_attribute(own, name, value)


def _is_registered(own: dict[str, Any], name: str) -> bool:
    """Whether the attribute is a parameter or a module by now, which torch does not keep among the others."""
    # (A script module has its own in C++.)
    return name in own.get("_parameters", ()) or name in own.get("_modules", ())


def set_attribute(own: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        own.pop(name, None)
    else:
        own[name] = value
