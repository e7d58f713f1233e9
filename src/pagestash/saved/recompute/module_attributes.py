"""Attributes of modules that are plain values: `training`, and whatever else a forward reads or counts in.

A replay finds numbers, strings, flags and None as they were when the first forward began; what it sets is undone.
Attributes that are tensors, lists, dicts or objects are not held: most are results, which holding would keep alive.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

from torch import nn

from pagestash.saved.recompute.trees import PLAIN

_ABSENT = object()
_NOT_PLAIN = object()


@dataclass(slots=True, frozen=True)
class PlainAttributes:
    """The names of attributes that were plain values in modules of one class, and a fast way to read them."""

    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]] = field(compare=False)

    @classmethod
    def of(cls, names: Iterable[str]) -> "PlainAttributes":
        # Of more than one name, an itemgetter gives a tuple; every module has these two.
        names = tuple(dict.fromkeys(("training", "_is_full_backward_hook", *names)))
        return cls(names, itemgetter(*names))

    def read(self, own: dict[str, Any]) -> tuple[Any, ...]:
        try:
            return self.get(own)
        except KeyError:
            return tuple(own.get(name, _ABSENT) for name in self.names)


AttributesOfClasses = dict[type, PlainAttributes]
"""Looking through all of a module's attributes takes 2 µs, reading the known ones a tenth of that. They are looked
through again whenever a region's values are checked."""


class ModuleAttributes:
    """Read before a region's first forward; `restored` for each replay."""

    def __init__(self, modules: Sequence[nn.Module], known: AttributesOfClasses, search: bool) -> None:
        """`search`: look for attributes that are not known yet."""
        self._before: list[tuple[dict[str, Any], PlainAttributes, tuple[Any, ...]]] = []
        for module in modules:
            own = module.__dict__
            plain = known.get(type(module))
            if plain is None or search:
                found = [name for name, value in own.items() if type(value) in PLAIN]
                plain = known[type(module)] = PlainAttributes.of((*(plain.names if plain else ()), *found))
            values = plain.read(own)
            if not PLAIN.issuperset(map(type, values)):
                values = tuple(v if type(v) in PLAIN or v is _ABSENT else _NOT_PLAIN for v in values)
            self._before.append((own, plain, values))

    def restored(self) -> "_Restored":
        """As they were before the first forward; what the replay sets is undone."""
        return _Restored(self._before)


class _Restored:
    """The context of one replay. (A class, because a generator's context takes 2 µs.)"""

    def __init__(self, before: list[tuple[dict[str, Any], PlainAttributes, tuple[Any, ...]]]) -> None:
        self._before = before
        self._now = [plain.read(own) for own, plain, _ in before]

    def __enter__(self) -> None:
        for (own, plain, values), there in zip(self._before, self._now):
            if not all(map(is_, values, there)):
                for name, value in zip(plain.names, values):
                    if value is not _NOT_PLAIN:
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
