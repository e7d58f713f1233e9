"""Attributes of modules: a replay finds them as they were when the first forward began, and what it sets is undone.

Which attributes a forward reads or sets is not known, so all are noted that are not torch's own. Until backward,
a reference is held to each value, so that a replay finds it also if another was set since. Beside that:

- Of a tensor with a graph, the values are held, and not the graph. A tensor that is changed in place is refused:
  unlike a buffer, it is not copied before forward.
- Contents of lists, dicts and deques are held, too, and restored in the same object, which others may have.
- What is changed inside of other objects is not seen.

What a forward sets inside of `once` is set again where a replay comes to that call.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import nn

from pagestash.saved.recompute.trees import PLAIN
from pagestash.torch_internals import without_torch_function

MANY = 1024
"""Entries of all containers in a region that are looked at one by one; of others, references are held."""
DEEP = 16
"""Containers and tuples in each other, of which contents are looked at."""
_TORCHS = frozenset(nn.Module().__dict__) - {"training", "_is_full_backward_hook"}
"""Attributes that torch keeps in every module, but two: an itemgetter takes two names or more."""

_AS_THEY_ARE = PLAIN | {FunctionType, BuiltinFunctionType, MethodType, partial, type}
"""Types of which nothing but a reference is held. (So it is for most others, which takes longer to find out.)"""
_ABSENT = object()

Attributes = dict[str, Any]
"""Of a module: its `__dict__`."""


class Names:
    """The names of a module's attributes."""

    __slots__ = ("get", "names")

    def __init__(self, own: Attributes) -> None:
        self.names = names = tuple([name for name in own if name not in _TORCHS])
        self.get: Callable[[Attributes], tuple[Any, ...]]
        if len(names) > 1:
            self.get = itemgetter(*names)
        else:  # a compiled module has none of its own
            self.get = lambda own: tuple([own[name] for name in names])


NamesOfClasses = dict[tuple[type, int], Names]
"""Of modules of a class, with so many attributes."""


class Set(Protocol):
    """Something that a call has set, and no replay would."""

    def set_again(self) -> None: ...


class SetAttribute(NamedTuple):
    """An attribute of a module, and what is held of its value."""

    own: Attributes
    name: str
    held: Any

    def set_again(self) -> None:
        self.own[self.name] = _value(self.held)


class _Held:
    """What is held for a value, where that is not the value itself."""

    __slots__ = ()

    def value(self) -> Any:
        raise NotImplementedError


class _WithGraph(_Held):
    """A tensor while it lives, and then its values: its graph is not kept alive."""

    __slots__ = ("_tensor", "_values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._values = ref(tensor), tensor.detach().requires_grad_()

    def value(self) -> torch.Tensor:
        tensor = self._tensor()
        return self._values if tensor is None else tensor


def _version(tensor: torch.Tensor) -> int:
    with without_torch_function():
        return tensor._version


class _Tuple(_Held):
    """A tuple in which something is not held as it is."""

    __slots__ = ("_items", "_make")

    def __init__(self, make: Callable[[list[Any]], Any], items: list[Any]) -> None:
        self._make, self._items = make, items

    def value(self) -> Any:
        return self._make([_value(item) for item in self._items])


class _Object(_Held):
    """An object with attributes of its own of which one has a graph."""

    __slots__ = ("_items", "_kind")

    def __init__(self, kind: type, items: Attributes) -> None:
        self._kind, self._items = kind, items

    def value(self) -> Any:
        made: Any = object.__new__(self._kind)
        made.__dict__.update((name, _value(item)) for name, item in self._items.items())
        return made


def _maker(kind: type) -> Callable[[list[Any]], Any] | None:
    """Makes a tuple of this class of its items; None for what is no such class."""
    if kind is tuple or hasattr(kind, "n_fields"):  # (torch's own, such as the result of `topk`)
        return kind
    return getattr(kind, "_make", None)


def _has_graph(value: Any) -> bool:
    if not issubclass(type(value), torch.Tensor):
        return False
    with without_torch_function():
        return value.requires_grad and not value.is_leaf


def _value(held: Any) -> Any:
    # (Not `isinstance`, which asks a proxy for the class of what it stands for.)
    return held.value() if issubclass(type(held), _Held) else held


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


_CONTENTS: dict[type, tuple[Callable[[Any], list[Any]], Callable[[Any, Sequence[Any]], None]]] = {
    **dict.fromkeys((list, deque), (list, _fill_list)),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), (_items, _fill_dict)),
}
"""How the contents of a container are read, and set. (Not of a set, whose order depends on what it had before.)"""


class _Container(NamedTuple):
    """A list or dict, the attribute it is in, and what is held of its contents."""

    own: Any
    name: str
    held: Sequence[Any]

    def now(self) -> list[Any]:
        return _CONTENTS[type(self.own)][0](self.own)

    def fill(self, contents: Sequence[Any]) -> None:
        if not _same(contents, self.now()):
            _CONTENTS[type(self.own)][1](self.own, contents)

    def set_again(self) -> None:
        self.fill(list(map(_value, self.held)))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


class _Before(NamedTuple):
    """A module's attributes, how many and which there were before forward, and what was held of them."""

    own: Attributes
    length: int
    names: Names
    held: tuple[Any, ...]


_before: Callable[[tuple[Attributes, int, Names, tuple[Any, ...]]], _Before] = partial(tuple.__new__, _Before)
"""Makes one of its fields, in a third of the time."""


class ModuleAttributes:
    """Noted before a region's first forward; `restored` for each replay."""

    def __init__(self, modules: Sequence[nn.Module], known: NamesOfClasses, region: str = "") -> None:
        self._region = region
        self.tensors: list[tuple[str, torch.Tensor, int]] = []
        """The attribute they are in, and their versions: they must not be changed in place."""
        self._containers: dict[int, _Container] = {}
        self._objects: dict[int, Any] = {}
        """What is held of other objects, by their `id`: configurations are those of many modules."""
        self._entries = 0
        """Of containers, so far."""
        self._before: list[_Before] = []
        for module in modules:
            own = module.__dict__
            length = len(own)
            try:
                names = known[type(module), length]
                values = names.get(own)
            except KeyError:  # new, or as many as another of its class has, and others
                names = known[type(module), length] = Names(own)
                values = names.get(own)
            if not _AS_THEY_ARE.issuperset(map(type, values)):
                held = [
                    value if type(value) in _AS_THEY_ARE else self._hold(value, name)
                    for name, value in zip(names.names, values)
                ]
                values = tuple(held)
            self._before.append(_before((own, length, names, values)))

    def _hold(self, value: Any, name: str, deep: int = 0) -> Any:
        """What is held for a value in the attribute `name`."""
        kind = type(value)
        if kind in _AS_THEY_ARE or deep == DEEP:
            return value
        if issubclass(kind, torch.Tensor):
            return self._hold_tensor(value, name)
        if kind in _CONTENTS:
            if id(value) not in self._containers:
                self._hold_contents(value, name, deep + 1)
            return value
        make = _maker(kind) if issubclass(kind, tuple) else None
        if make is not None:
            items = [self._hold(item, name, deep + 1) for item in value]
            return value if all(map(is_, items, value)) else _Tuple(make, items)
        if id(value) not in self._objects:
            self._objects[id(value)] = self._hold_object(value, name, deep + 1)
        return self._objects[id(value)]

    def _hold_tensor(self, tensor: torch.Tensor, name: str) -> Any:
        with without_torch_function():
            if tensor.is_inference():
                return tensor  # outside inference mode nothing changes it
            has_graph = tensor.requires_grad and not tensor.is_leaf
            self.tensors.append((name, tensor.detach() if has_graph else tensor, tensor._version))
            return _WithGraph(tensor) if has_graph else tensor

    def _hold_contents(self, own: Any, name: str, deep: int) -> None:
        contents: list[Any] = []
        self._containers[id(own)] = container = _Container(
            own, name, contents
        )  # first, as one may be in itself
        now = container.now()
        self._entries += len(now)
        if self._entries > MANY or _AS_THEY_ARE.issuperset(map(type, now)):
            contents.extend(now)
        else:
            contents.extend([self._hold(item, name, deep) for item in now])

    def _hold_object(self, value: Any, name: str, deep: int) -> Any:
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return value
        if isinstance(own, dict) and any(map(_has_graph, own.values())):
            return _Object(type(value), {each: self._hold(item, name, deep) for each, item in own.items()})
        return value

    def set_by(self, call: Callable[[], Any]) -> tuple[Any, list[Set]]:
        """The result of `call`, which no replay repeats, and what it set."""
        lengths, then = self._now()
        contents = [(container, container.now()) for container in self._containers.values()]
        result = call()
        found: list[Set] = [
            container._replace(held=[self._hold(item, container.name) for item in container.now()])
            for container, old in contents
            if not _same(container.now(), old)
        ]
        lengths_now, now = self._now()
        if lengths != lengths_now or not all(map(is_, chain(*then), chain(*now))):
            for (own, _, names, _), values in zip(self._before, then):
                before = dict(zip(names.names, values))
                found += [
                    SetAttribute(own, name, self._hold(value, name))
                    for name, value in own.items()
                    if name not in _TORCHS and before.get(name, _ABSENT) is not value
                ]
        return result, found

    def _now(self) -> tuple[list[int], list[tuple[Any, ...]]]:
        """Of each module: how many attributes there are, and the values of those that there were before forward."""
        lengths = [len(own) for own, _, _, _ in self._before]
        try:
            return lengths, [names.get(own) for own, _, names, _ in self._before]
        except KeyError:
            return lengths, [_values(names, own) for own, _, names, _ in self._before]

    def check(self) -> None:
        """Refuse if a tensor was changed in place."""
        names = [name for name, tensor, version in self.tensors if _version(tensor) != version]
        if names:
            raise RuntimeError(
                f"region {self._region!r} is under recompute, and a tensor in its attribute {names[0]!r} was "
                "changed in place, so that its forward cannot be replayed; register it as a buffer, which is "
                "copied, or give the region another home"
            )

    def restored(self) -> "_Restored":
        """As they were before the first forward; what the replay sets is undone."""
        return _Restored(self._before, list(self._containers.values()))


def _values(names: Names, own: Attributes) -> tuple[Any, ...]:
    try:
        return names.get(own)
    except KeyError:
        return tuple([own.get(name, _ABSENT) for name in names.names])


class _Restored:
    """The context of one replay. (A class, because a generator's context takes 2 µs.)"""

    def __init__(self, before: list[_Before], containers: list[_Container]) -> None:
        self._before, self._containers = before, containers
        self._now = [own.copy() for own, _, _, _ in before]
        self._contents = [container.now() for container in containers]
        self._set: set[int] = set()
        """Numbers of modules that have other attributes now than before forward."""

    def __enter__(self) -> None:
        for number, (own, count, names, held) in enumerate(self._before):
            if len(own) != count or not all(map(is_, held, _values(names, own))):
                self._set.add(number)
                _set_all(own, {name: _value(value) for name, value in zip(names.names, held)}, replay=True)
        for container in self._containers:
            container.set_again()

    def __exit__(self, *error: object) -> None:
        for number, ((own, count, names, held), now) in enumerate(zip(self._before, self._now)):
            if number in self._set or len(own) != count or not all(map(is_, held, _values(names, own))):
                _set_all(own, now)
        for container, contents in zip(self._containers, self._contents):
            container.fill(contents)


def _set_all(own: Attributes, values: Attributes, *, replay: bool = False) -> None:
    """Give a module these attributes, and no others beside torch's."""
    for name in [name for name in own if name not in values and name not in _TORCHS]:
        del own[name]
    for name, value in values.items():
        # What has become a parameter, a buffer or a module is no longer among the others.
        if name not in _TORCHS and not (replay and _is_registered(own, name)):
            own[name] = value


def _is_registered(own: Attributes, name: str) -> bool:
    # (A script module has its own in C++.)
    return any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
