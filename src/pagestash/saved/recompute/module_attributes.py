"""Attributes of modules: a replay finds them as they were when the first forward began, and what it sets is undone.

Which attributes a forward reads or sets is not known, so all are noted that are not torch's own. A reference to
each value is held until backward. What may have a graph is let go of at the end of the step: no backward may walk
that graph, and it holds what its regions hold. A backward after its step is refused where it was replaced.

- Contents of lists, dicts and deques are held, too, and restored in the same object, which others may have.
- A tensor that is changed in place is refused: unlike a buffer, it is not copied before forward.
- What is changed inside of other objects is not seen.

What a forward sets inside of `once` is set again where a replay comes to that call.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import nn

from pagestash.saved.recompute.attribute_values import (
    ABSENT,
    CONTENTS,
    DEEP,
    MANY,
    Container,
    Gone,
    container_of,
    has_no_graph,
    same,
    same_contents,
)
from pagestash.saved.recompute.trees import PLAIN
from pagestash.saved.storage import plain_storage
from pagestash.torch_internals import buffers_of, parameters_of, without_torch_function

_TORCHS = frozenset(nn.Module().__dict__) - {"training", "_is_full_backward_hook"}
"""Attributes that torch keeps in every module, but two: an itemgetter takes two names or more."""
_REGISTERED = "_parameters", "_buffers", "_modules"

Attributes = dict[str, Any]
"""Of a module: its `__dict__`."""
WeightsOf = Callable[[Attributes], Collection[str]]


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

    def values(self, own: Attributes) -> tuple[Any, ...]:
        try:
            return self.get(own)
        except KeyError:
            return tuple([own.get(name, ABSENT) for name in self.names])


class KnownAttributes:
    """What earlier forwards have shown, so that it need not be found out again."""

    def __init__(self) -> None:
        self.names: dict[tuple[type, int], Names] = {}
        """Of modules of a class, with so many attributes."""
        self.plain: set[type] = {*PLAIN, FunctionType, BuiltinFunctionType, MethodType, partial, type}
        """Types of which nothing but a reference is held."""


class Change(Protocol):
    """Something that a call has set, and no replay would."""

    @property
    def name(self) -> str: ...

    def set_again(self) -> None: ...

    def has_no_graph(self) -> bool: ...


class SetAttribute(NamedTuple):
    """An attribute of a module, and its value, or `ABSENT`."""

    own: Attributes
    name: str
    value: Any

    def set_again(self) -> None:
        if self.value is ABSENT:
            self.own.pop(self.name, None)
        else:
            self.own[self.name] = self.value

    def has_no_graph(self) -> bool:
        return has_no_graph(self.value)


class _Before(NamedTuple):
    """A module's attributes, and how many and which there were before forward."""

    own: Attributes
    length: int
    names: Names
    values: tuple[Any, ...]

    def same(self) -> bool:
        return len(self.own) == self.length and all(map(is_, self.values, self.names.values(self.own)))


def _differing(one: Attributes, other: Attributes) -> list[str]:
    """Names of attributes, but torch's, that are not the same in both."""
    return [
        name
        for name in {**one, **other}
        if name not in _TORCHS and one.get(name, ABSENT) is not other.get(name, ABSENT)
    ]


_before: Callable[[tuple[Attributes, int, Names, tuple[Any, ...]]], _Before] = partial(tuple.__new__, _Before)


def _same_attributes(modules: Sequence[_Before]) -> bool:
    """Whether all have the same attributes as before."""
    try:
        for own, length, names, values in modules:
            if len(own) != length or not all(map(is_, values, names.get(own))):
                return False
    except KeyError:
        return False
    return True


class ModuleAttributes:
    """Noted before a region's first forward; `restored` for each replay."""

    def __init__(self, modules: Sequence[nn.Module], known: KnownAttributes, region: str = "") -> None:
        self._modules = modules
        self._region = region
        self._plain = plain = known.plain
        self.tensors: list[tuple[str, torch.Tensor, int]] = []
        """The attribute they are in, and their versions: they must not be changed in place."""
        self._tensors_gone: list[tuple[str, ref[torch.Tensor], int]] = []
        """The same of those that are not held any more."""
        self._containers: dict[int, Container] = {}
        self._entries = 0
        """Of containers, so far."""
        self._set_once: list[list[Change]] = []
        self._step_is_over = False
        self._lost: str | None = None
        """An attribute that a replay would have to set, and of which nothing is held any more."""
        self._before: list[_Before] = []
        for module in modules:
            own = module.__dict__
            length = len(own)
            try:
                names = known.names[type(module), length]
                values = names.get(own)
            except KeyError:  # new, or as many as another of its class has, and others
                names = known.names[type(module), length] = Names(own)
                values = names.get(own)
            if not plain.issuperset(map(type, values)):
                for name, value in zip(names.names, values):
                    if type(value) not in plain:
                        self._look_into(value, name)
            self._before.append(_before((own, length, names, values)))

    def _look_into(self, value: Any, name: str, deep: int = 0) -> None:
        """Note what can be changed inside of a value in the attribute `name`."""
        kind = type(value)
        if kind in self._plain or deep == DEEP:
            return
        # (Not `isinstance`, which asks a proxy for the class of what it stands for.)
        if issubclass(kind, torch.Tensor):
            with without_torch_function():
                if not value.is_inference():  # outside inference mode nothing changes such a one
                    self.tensors.append((name, value, value._version))
        elif kind in CONTENTS:
            if id(value) not in self._containers:
                read = CONTENTS[kind][0]
                contents = read(value)
                self._containers[id(value)] = container_of((value, read, contents, name))
                self._entries += len(contents)
                if self._entries <= MANY:  # (it may be in itself)
                    self._look_into_all(contents, name, deep)
        elif issubclass(kind, tuple):
            self._look_into_all(value, name, deep)
        else:
            self._plain.add(kind)

    def _look_into_all(self, values: Sequence[Any], name: str, deep: int) -> None:
        if not self._plain.issuperset(map(type, values)):
            for value in values:
                self._look_into(value, name, deep + 1)

    def set_by(self, call: Callable[[], Any]) -> tuple[Any, list[Change]]:
        """The result of `call`, which no replay repeats, and what it set."""
        then = [(before.own, before.own.copy()) for before in self._before]
        contents = [(container, container.now()) for container in self._containers.values()]
        result = call()
        found: list[Change] = [
            container._replace(contents=container.now())
            for container, old in contents
            if not same(container.now(), old)
        ]
        for own, old in then:
            if not same(old.values(), own.values()):
                for name in _differing(old, own):
                    value = own.get(name, ABSENT)
                    self._look_into(value, name)
                    found.append(SetAttribute(own, name, value))
        self._set_once.append(found)
        return result, found

    def check(self, *, forward: bool = False) -> None:
        """Refuse if a tensor was changed in place. `forward`: it is just over."""
        gone = [(name, found(), version) for name, found, version in self._tensors_gone]
        for name, tensor, version in (*self.tensors, *gone):
            if tensor is None:  # `restored` refuses that
                continue
            with without_torch_function():
                changed = tensor._version != version
            if changed and not self._registered(tensor):
                how = "by its forward" if forward else "between forward and backward"
                raise RuntimeError(
                    f"region {self._region!r} is under recompute, and a tensor in its attribute {name!r} was "
                    f"changed in place {how}, so that it cannot be replayed; register the tensor as a buffer, "
                    "give it a new value instead, or give the region another home"
                )

    def _registered(self, tensor: torch.Tensor) -> bool:
        """Whether it is a buffer or parameter under another name, or a view of one: those are looked after."""
        key = plain_storage(tensor)
        return key is not None and any(
            plain_storage(each) == key
            for module in self._modules
            for each in (*buffers_of(module).values(), *parameters_of(module).values())
            if each is not None
        )

    def restored(self, weights_of: WeightsOf = lambda own: ()) -> "_Restored":
        """As they were before the first forward; what the replay sets is undone.

        `weights_of`: names of parameters that forward had, which stay as they are. (FSDP makes plain attributes of
        them in backward.)
        """
        if self._lost is not None:
            raise self._refusal(self._lost)
        before = [self._as_held(each) for each in self._before] if self._step_is_over else self._before
        return _Restored(before, list(self._containers.values()), weights_of)

    def _as_held(self, before: _Before) -> _Before:
        """With what is there now in place of what was let go of, if it is the same."""
        values = []
        for name, value in zip(before.names.names, before.values):
            if type(value) is Gone:
                now = before.own.get(name, ABSENT)
                if not value.stands_for(now):
                    raise self._refusal(name)
                value = now
            values.append(value)
        return before._replace(values=tuple(values))

    def _refusal(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"region {self._region!r} is under recompute, and its attribute {name!r} has changed since its "
            "forward, whose step is over, or has too much in it to be known again, so that it cannot be replayed; "
            "run backward inside of the step, or give the region another home"
        )

    def let_go(self) -> None:
        """The step is over: hold nothing any more that may have a graph."""
        self._step_is_over = True
        self._before = [
            before._replace(values=tuple([v if has_no_graph(v) else Gone(v) for v in before.values]))
            for before in self._before
        ]
        held = [has_no_graph(tensor) for _, tensor, _ in self.tensors]
        self._tensors_gone += [
            (name, ref(tensor), version)
            for (name, tensor, version), kept in zip(self.tensors, held)
            if not kept
        ]
        self.tensors = [each for each, kept in zip(self.tensors, held) if kept]
        for key, container in list(self._containers.items()):
            if not container.has_no_graph():
                del self._containers[key]
                if not same(container.contents, container.now()):
                    self._lost = container.name
        for found in self._set_once:
            lost = [each.name for each in found if not each.has_no_graph()]
            if lost:
                self._lost = lost[0]
                found.clear()


class _Restored:
    """The context of one replay. (A class, because a generator's context takes 2 µs.)"""

    def __init__(
        self,
        before: list[_Before],
        containers: list[Container],
        weights_of: WeightsOf,
    ) -> None:
        self._before, self._containers, self._weights_of = before, containers, weights_of
        self._set: dict[int, Attributes] = {}
        """By number of the module: attributes that it has now, where these are others than before forward."""
        self._filled: dict[int, list[Any]] = {}
        """The same for contents of containers."""

    def __enter__(self) -> None:
        if not _same_attributes(self._before):
            for number, before in enumerate(self._before):
                if not before.same():
                    own, values = before.own, dict(zip(before.names.names, before.values))
                    self._set[number] = own.copy()
                    # What has become a parameter, a buffer or a module is no longer among the others.
                    registered = {name for kind in _REGISTERED for name in own.get(kind, ())}
                    values = {name: value for name, value in values.items() if name not in registered}
                    self._set_all(own, values)
        if not same_contents(self._containers):
            for number, container in enumerate(self._containers):
                now = container.now()
                if not same(container.contents, now):
                    self._filled[number] = now
                    container.set_again()

    def __exit__(self, *error: object) -> None:
        if self._set or not _same_attributes(self._before):
            for number, before in enumerate(self._before):
                if number in self._set:
                    self._set_all(before.own, self._set[number])
                elif not before.same():
                    self._set_all(before.own, dict(zip(before.names.names, before.values)))
        if self._filled or not same_contents(self._containers):
            for number, container in enumerate(self._containers):
                contents = self._filled.get(number, container.contents)
                if not same(contents, container.now()):
                    container._replace(contents=contents).set_again()

    def _set_all(self, own: Attributes, values: Attributes) -> None:
        """Give a module these attributes, and no others beside torch's and its weights."""
        stay = {*_TORCHS, *self._weights_of(own)}
        for name in [name for name in own if name not in values and name not in stay]:
            del own[name]
        own.update((name, value) for name, value in values.items() if name not in stay)
