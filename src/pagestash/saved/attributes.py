"""Plain attributes of modules: `training`, and whatever else a forward reads or counts in.

Numbers, strings, flags and None are as they were when the first forward began, and what a later one sets is undone.
Attributes that are tensors, lists, dicts or objects are not held: most are results, which holding would keep alive.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
)
"""Types whose values nobody can change."""


@dataclass(slots=True, frozen=True)
class Plain:
    """The attributes of a class of modules that were seen to be plain values."""

    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]] = field(compare=False)

    @classmethod
    def of(cls, names: Iterable[str]) -> "Plain":
        # Of more than one name, an itemgetter gives a tuple; every module has `training`.
        names = tuple(dict.fromkeys(("training", "_is_full_backward_hook", *names)))
        return cls(names, itemgetter(*names))

    def read(self, own: dict[str, Any]) -> tuple[Any, ...]:
        try:
            return self.get(own)
        except KeyError:
            return tuple(own.get(name, _ABSENT) for name in self.names)


Names = WeakKeyDictionary[type, Plain]
"""To look through all of a module's attributes takes 2 µs, to read these a tenth of it. (They are looked through
again whenever a region is checked.)"""

_ABSENT = object()
_OTHER = object()


class Attributes:
    """Taken before a module's first forward; `put_back` for each of its later ones."""

    def __init__(self, modules: Sequence[nn.Module], known: Names, look: bool) -> None:
        self._taken: list[tuple[dict[str, Any], Plain, tuple[Any, ...]]] = []
        for module in modules:
            own = module.__dict__
            plain = known.get(type(module))
            if plain is None or look:
                found = [name for name, value in own.items() if type(value) in PLAIN]
                plain = known[type(module)] = Plain.of((*(plain.names if plain else ()), *found))
            values = plain.read(own)
            if not PLAIN.issuperset(map(type, values)):
                values = tuple(v if type(v) in PLAIN or v is _ABSENT else _OTHER for v in values)
            self._taken.append((own, plain, values))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """As they were before the first forward; what the new one sets is undone."""
        now = [plain.read(own) for own, plain, _ in self._taken]
        try:
            for (own, plain, values), there in zip(self._taken, now):
                if not all(map(is_, values, there)):
                    for name, value in zip(plain.names, values):
                        if value is not _OTHER:
                            _set(own, name, value)
            yield
        finally:
            for (own, plain, _), there in zip(self._taken, now):
                if not all(map(is_, there, plain.read(own))):
                    for name, value in zip(plain.names, there):
                        _set(own, name, value)


def _set(own: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        own.pop(name, None)
    else:
        own[name] = value
