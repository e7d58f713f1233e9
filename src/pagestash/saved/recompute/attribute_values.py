"""Values in attributes of modules: contents of lists and dicts, and which values may have a graph."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
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
    """Stands for a value that is not held any more, and knows it again.

    Its id is not enough: a new tuple may get the id of one that is gone. So there is a weak reference to the value.
    Of a list, dict or tuple there is one to each part that may have a graph, and parts without a graph are held.
    """

    __slots__ = ("_kind", "_parts", "_ref")

    def __init__(self, value: Any, most: list[int] | None = None) -> None:
        """`most`: how many parts may be noted, of all values in each other. Of more, none is known again."""
        self._kind = type(value)
        self._ref: Callable[[], Any] | None = None
        self._parts: list[Any] | None = None
        parts = parts_of(value)
        if parts is None:
            try:
                self._ref = ref(value)
            except TypeError:  # a class written in C, like `range`: nothing in it can be seen
                self._ref = lambda: value
            return
        most = [MANY] if most is None else most
        most[0] -= len(parts)
        if most[0] >= 0:
            self._parts = [part if has_no_graph(part) else Gone(part, most) for part in parts]

    def stands_for(self, value: Any) -> bool:
        if type(value) is not self._kind:
            return False
        if self._ref is not None:
            return self._ref() is value
        parts = parts_of(value)
        if parts is None or self._parts is None or len(parts) != len(self._parts):
            return False
        return all(
            held.stands_for(part) if type(held) is Gone else held is part
            for held, part in zip(self._parts, parts)
        )


def parts_of(value: Any) -> list[Any] | None:
    """What is in a value of a class that takes no weak references, if that can be seen; else None."""
    kind = type(value)
    if kind in CONTENTS:
        return CONTENTS[kind][0](value)
    if issubclass(kind, tuple):
        return list(value)
    if kind is slice:
        return [value.start, value.stop, value.step]
    if kind.__weakrefoffset__ == 0 and not kind.__dictoffset__:
        slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
        names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        return [getattr(value, name, ABSENT) for name in names] or None
    return None


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
