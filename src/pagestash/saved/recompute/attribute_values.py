"""Values in attributes of modules: contents of lists and dicts, and which values may have a graph."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from gc import is_tracked
from numbers import Number
from operator import is_
from types import MemberDescriptorType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch

from pagestash.saved.recompute.trees import PLAIN
from pagestash.torch_internals import without_torch_function

MANY = 1024
"""Entries of all containers in a region that are looked at one by one; of others, references are held."""
DEEP = 16
"""Containers and tuples in each other, of which contents are looked at."""
WRITTEN_IN_PYTHON = 1 << 9
"""In the `__flags__` of a class: `Py_TPFLAGS_HEAPTYPE`."""
ABSENT = object()
"""In place of the value of an attribute that there is not."""


class Gone:
    """Stands for a value that is not held any more, and knows it again.

    Its id is not enough: a new tuple may get the id of one that is gone. So there is a weak reference to the value.
    Of a value that takes none, like a list, dict or tuple, there is one to each part that may have a graph. Parts
    without a graph are held. A value with too many parts is not known again.
    """

    __slots__ = ("_kind", "_parts", "_ref")

    def __init__(self, value: Any, most: list[int] | None = None, deep: int = 0) -> None:
        """`most`: how many parts may still be noted, of all values in each other."""
        self._kind = type(value)
        self._ref: Callable[[], Any] = lambda: None
        self._parts: list[Any] | None = None
        parts = parts_of(value)
        if parts is None:
            try:
                self._ref = ref(value)
            except TypeError:
                if not is_tracked(value):  # it refers to nothing: a `range`, a generator of random numbers
                    self._ref = lambda: value
            return
        most = [MANY] if most is None else most
        most[0] -= len(parts)
        if most[0] >= 0 and deep < DEEP:
            self._parts = [part if has_no_graph(part) else Gone(part, most, deep + 1) for part in parts]

    def stands_for(self, value: Any) -> bool:
        if type(value) is not self._kind:
            return False
        if self._parts is None:
            return self._ref() is value
        parts = parts_of(value)
        return len(parts or ()) == len(self._parts) and all(
            held.stands_for(part) if type(held) is Gone else held is part
            for held, part in zip(self._parts, parts or ())
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
    if kind.__weakrefoffset__:
        return None
    # By their descriptors: in a class, private slots have other names.
    classes = [own for own in kind.__mro__ if own.__flags__ & WRITTEN_IN_PYTHON]
    slots = [each for own in classes for each in vars(own).values() if type(each) is MemberDescriptorType]
    attributes = getattr(value, "__dict__", None) if kind.__dictoffset__ else None
    if not slots and not isinstance(attributes, dict):
        return None
    found = [_slot(each, value) for each in slots]
    return found if attributes is None else [*found, *_items(attributes)]


def _slot(descriptor: MemberDescriptorType, value: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return ABSENT


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
        if PLAIN.issuperset(map(type, items)):
            return True
        if deep >= DEEP:
            return False
        inside = deep + 1 if len(items) <= MANY else DEEP  # of so many, none is looked into
        return all(has_no_graph(item, inside) for item in items)
    return issubclass(kind, (Number, Enum, ReferenceType))


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
