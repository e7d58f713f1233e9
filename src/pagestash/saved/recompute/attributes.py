"""Attributes of modules: a replay finds those that its forward found, and what it sets is undone.

All are held that are not torch's own: as references, and with the contents of lists, dicts and deques. What a
module changes inside of other objects, or in place in a tensor that is no buffer, is not put back.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

from torch import nn

_TORCHS = frozenset(nn.Module().__dict__) - {"training"}
_REGISTERED = "_parameters", "_buffers", "_modules"
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque)
_ABSENT = object()

Names = Callable[[dict[str, Any]], Collection[str]]
"""Of the module that has this `__dict__`."""


class Attributes:
    """The attributes of `modules`, as they are now."""

    def __init__(self, modules: Sequence[nn.Module], containers: Iterable[Any] = ()) -> None:
        """`containers`: others whose contents are to be held."""
        self._modules = modules
        self._values = [_attributes(module) for module in modules]
        found = [v for values in self._values for v in values.values() if _is_container(v)]
        self._contents = [(container, _contents(container)) for container in (*found, *containers)]

    @contextmanager
    def restored(self, stay: Names = lambda own: ()) -> Iterator[None]:
        """They are as they were; what is set meanwhile is undone. The names in `stay` are left alone."""
        now = Attributes(self._modules, [container for container, _ in self._contents])
        self._put_back(stay)
        try:
            yield
        finally:
            now._put_back(stay)

    def _put_back(self, stay: Names) -> None:
        for module, values in zip(self._modules, self._values):
            own = module.__dict__
            if not _same(_attributes(module), values):
                # (What has become a parameter, a buffer or a module is no longer among the others.)
                left = {*_TORCHS, *stay(own)}.union(*(own.get(kind, ()) for kind in _REGISTERED))
                for name in [name for name in own if name not in values and name not in left]:
                    del own[name]
                own.update((name, value) for name, value in values.items() if name not in left)
        for container, contents in self._contents:
            if not _same(container, contents):
                _fill(container, contents)

    def changes(self) -> list[Callable[[], None]]:
        """What has been set since: each sets something of it again."""
        found: list[Callable[[], None]] = [
            partial(_fill, own, _contents(own))
            for own, contents in self._contents
            if not _same(own, contents)
        ]
        for module, before in zip(self._modules, self._values):
            now = _attributes(module)
            if not _same(now, before):
                values = {name: now.get(name, _ABSENT) for name in {**before, **now}}
                values = {n: v for n, v in values.items() if v is not before.get(n, _ABSENT)}
                found.append(partial(_set, module.__dict__, values))
                found += [partial(_fill, v, _contents(v)) for v in values.values() if _is_container(v)]
        return found


def _set(own: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _TORCHS}


def _is_container(value: Any) -> bool:
    # (Not `isinstance`, which asks a proxy for the class of what it stands for.)
    return issubclass(type(value), _CONTAINERS)


def _contents(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(one: Any, other: Any) -> bool:
    """Whether two containers of one kind have the same entries, in the same order."""
    if len(one) != len(other) or not all(map(is_, one, other)):
        return False
    return not isinstance(one, dict) or all(map(is_, one.values(), other.values()))


def _fill(container: Any, contents: Any) -> None:
    """(By the methods of the class below: `update` of a `Counter` adds, and other classes do more.)"""
    kind = next(each for each in _CONTAINERS if isinstance(container, each))
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in contents.items():
            kind.__setitem__(container, key, value)
    else:
        kind.extend(container, contents)
