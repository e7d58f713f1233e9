"""Values in attributes of modules: contents of lists and dicts, and which values may have a graph."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from numbers import Number
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch

from pagestash.saved.recompute.trees import PLAIN
from pagestash.torch_internals import without_torch_function

MANY = 1024
"""Entries of all containers in a region that are looked at one by one; of others, references are held."""
DEEP = 16
"""Containers and tuples in each other, of which contents are looked at."""
ABSENT = object()
"""In place of the value of an attribute that there is not."""


class Gone:
    """Stands for a value that is not held any more."""

    __slots__ = ("_id", "_ref")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._ref: Callable[[], Any] | None = None
        with suppress(TypeError):  # not all classes allow it
            self._ref = ref(value)

    def stands_for(self, value: Any) -> bool:
        return id(value) == self._id and (self._ref is None or self._ref() is value)


def has_no_graph(value: Any, deep: int = 0) -> bool:
    """Whether a value, as far as its class tells, refers to no tensor with a graph."""
    kind = type(value)
    if kind in PLAIN or value is ABSENT:
        return True
    if issubclass(kind, torch.Tensor):
        with without_torch_function():
            return value.grad_fn is None
    if kind in CONTENTS or issubclass(kind, tuple):
        items = CONTENTS[kind][0](value) if kind in CONTENTS else value
        return deep < DEEP and len(items) <= MANY and all(has_no_graph(item, deep + 1) for item in items)
    return issubclass(kind, (Number, Enum))


def _items(own: dict[Any, Any]) -> list[Any]:
    return [*own.keys(), *own.values()]


def _fill_dict(own: Any, contents: Sequence[Any]) -> None:
    half = len(contents) // 2
    own.clear()
    for key, value in zip(contents[:half], contents[half:]):  # (`update` of a `Counter` adds)
        own[key] = value


def _fill_list(own: Any, contents: Sequence[Any]) -> None:
    own.clear()
    own.extend(contents)


CONTENTS: dict[type, tuple[Callable[[Any], list[Any]], Callable[[Any, Sequence[Any]], None]]] = {
    **dict.fromkeys((list, deque), (list, _fill_list)),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), (_items, _fill_dict)),
}
"""How the contents of a container are read, and set. (Not of a set, whose order depends on what it had before.)"""


class Container(NamedTuple):
    """A list or dict, how its contents are read, the contents, and the attribute it is in."""

    own: Any
    read: Callable[[Any], list[Any]]
    contents: list[Any]
    name: str

    def now(self) -> list[Any]:
        return self.read(self.own)

    def set_again(self) -> None:
        CONTENTS[type(self.own)][1](self.own, self.contents)

    def has_no_graph(self) -> bool:
        return has_no_graph(self.own) and has_no_graph(self.contents)


container_of: Callable[[tuple[Any, Callable[[Any], list[Any]], list[Any], str]], Container]
container_of = partial(tuple.__new__, Container)
"""Makes one of its fields, in a third of the time. (Adapters have a hundred of them in a layer.)"""


def same(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def same_contents(containers: Collection[Container]) -> bool:
    """Whether all have the same contents as before."""
    for own, read, contents, _ in containers:
        if contents or own:
            now = read(own)
            if len(now) != len(contents) or not all(map(is_, now, contents)):
                return False
    return True
