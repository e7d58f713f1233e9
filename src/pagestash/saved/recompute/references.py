"""What modules refer to: a replay finds all that its forward found, and what it sets is undone.

These are the attributes of each module, its parameters, buffers and modules inside, and the entries of attributes
that are lists, dicts or deques. What a module changes inside of other objects, or in place in a tensor, is not put
back.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from pagestash.saved.recompute.undo import Undo
from pagestash.torch_internals import LOCAL_PART, buffers_of, children_of, parameters_of

_TORCHS = list(nn.Module().__dict__)
"""Torch's own attributes. (They come first in most modules, and to leave them out by name takes longer.)"""
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque)
_ABSENT = object()

Names = dict[str, Any]


class References:
    """What `modules` refer to now."""

    def __init__(self, modules: Sequence[nn.Module], containers: Iterable[Any] = ()) -> None:
        """`containers`: others whose entries are to be held."""
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._names = [tuple(map(dict.copy, _names_in(module))) for module in modules]
        """Of each module: its attributes, parameters, buffers and modules inside."""
        found = [value for names in self._names for value in _containers_in(names[0])]
        self._containers = [(container, _entries(container)) for container in (*found, *containers)]

    def check(self, region: str) -> None:
        """Refuse a replay of `region` if a parametrization was put on or taken off since."""
        for module, kind in zip(self._modules, self._kinds):
            if type(module) is not kind:
                raise RuntimeError(
                    f"region {region!r} is under recompute, and a {kind.__name__} that was in it in forward is "
                    f"gone in backward (a {type(module).__name__} is there), so that its tensors cannot be "
                    "recomputed. A parametrization may be there only while the module around it runs, as one of "
                    "PEFT's target_parameters is: give the rule to the module around it, or the region another home"
                )

    def restore(self, undo: Undo) -> None:
        """Put everything back as it was; `undo`: as it is now."""
        now = self
        if self._differ():
            now = References(self._modules, [container for container, _ in self._containers])
            self.put_back()
        undo.append(now.put_back)

    def _differ(self) -> bool:
        for module, names in zip(self._modules, self._names):
            if not all(map(_same_names, _names_in(module), names)):
                return True
        return not all(_same(container, entries) for container, entries in self._containers)

    def put_back(self) -> None:
        """All is as it was, but for weights that FSDP has gathered or sharded since."""
        for module, names in zip(self._modules, self._names):
            names_now = _names_in(module)
            if not all(map(_same_names, names_now, names)):
                (own_now, weights_now, *_), (own, weights, *_) = names_now, names
                # FSDP1 makes plain attributes of them.
                left = {*(own.keys() & weights_now), *(own_now.keys() & weights)}
                left |= {name for name, now in weights_now.items() if is_sharded(now, weights.get(name))}
                for now, before in zip(names_now, names):
                    for name in now.keys() - before.keys() - left:
                        del now[name]
                    if not left and [*now] != [*before]:
                        now.clear()  # their order is what forward saw, too
                    now.update((name, value) for name, value in before.items() if name not in left)
        for container, entries in self._containers:
            if not _same(container, entries):
                _fill(container, entries)

    def changes(self) -> list[Callable[[], None]]:
        """What has been set since: each sets something of it again."""
        found: list[Callable[[], None]] = []
        now = References(self._modules, [container for container, _ in self._containers])
        for module, names in zip(self._modules, self._names):
            for own, before in zip(_names_in(module), names):
                after = own.copy()
                values = {name: after.get(name, _ABSENT) for name in {**before, **after}}
                values = {n: value for n, value in values.items() if value is not before.get(n, _ABSENT)}
                if values:
                    found.append(partial(_set, own, values))
        known = {id(container): entries for container, entries in self._containers}
        for container, entries in now._containers:
            if id(container) not in known or not _same(known[id(container)], entries):
                found.append(partial(_fill, container, entries))
        return found


def _names_in(module: nn.Module) -> tuple[Names, Names, Names, Names]:
    return module.__dict__, parameters_of(module), buffers_of(module), children_of(module)


def _containers_in(own: Names) -> list[Any]:
    """The attributes that are containers."""
    values = [*own.values()][len(_TORCHS) :]
    if [*own][: len(_TORCHS)] != _TORCHS:
        values = [value for name, value in own.items() if name not in _TORCHS]
    # (Not `isinstance`, which asks a proxy for the class of what it stands for.)
    return [value for value in values if issubclass(type(value), _CONTAINERS)]


def is_sharded(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether one of these is a shard of FSDP2's, and the other is not."""
    return hasattr(tensor, LOCAL_PART) != hasattr(other, LOCAL_PART)


def _set(own: Names, values: Names) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = value


def _entries(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same_names(one: Names, other: Names) -> bool:
    """`_same`, of dicts whose keys can be compared."""
    return not (one or other) or (
        len(one) == len(other) and [*one] == [*other] and all(map(is_, one.values(), other.values()))
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two containers of one kind have the same entries, in the same order."""
    if len(one) != len(other) or not all(map(is_, one, other)):
        return False
    return not isinstance(one, dict) or all(map(is_, one.values(), other.values()))


def _fill(container: Any, entries: Any) -> None:
    """(By the methods of the class below: `update` of a `Counter` adds, and other classes do more.)"""
    kind = next(each for each in _CONTAINERS if isinstance(container, each))
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in entries.items():
            kind.__setitem__(container, key, value)
    else:
        kind.extend(container, entries)
