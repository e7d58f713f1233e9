"""Attributes of modules: a replay finds those that its forward found, and what it sets is undone.

All are held that are not torch's own: as references, and with the contents of lists, dicts and deques. What a
module changes inside of other objects, or in place in a tensor that is no buffer, is not put back.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

from torch import nn

_TORCHS = frozenset(nn.Module().__dict__) - {"training"}
_REGISTERED = "_parameters", "_buffers", "_modules"
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque)
_ABSENT = object()

Names = Callable[[dict[str, Any]], Collection[str]]
"""Of the module that has this `__dict__`."""


class Change(NamedTuple):
    """What a call set in one module or container, where no replay calls it."""

    own: Any
    values: Any

    def set_again(self) -> None:
        if type(self.values) is not _Set:
            _fill(self.own, self.values)
            return
        for name, value in self.values.items():
            if value is _ABSENT:
                self.own.pop(name, None)
            else:
                self.own[name] = value


class _Set(dict[str, Any]):
    """Attributes of a module that were set, or are `_ABSENT` now."""


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

    def changes(self) -> list[Change]:
        """What has been set since."""
        found = [Change(own, _contents(own)) for own, contents in self._contents if not _same(own, contents)]
        for module, before in zip(self._modules, self._values):
            now = _attributes(module)
            if not _same(now, before):
                values = _Set()
                for name in {**before, **now}:
                    value = now.get(name, _ABSENT)
                    if value is not before.get(name, _ABSENT):
                        values[name] = value
                found.append(Change(module.__dict__, values))
                found += [Change(v, _contents(v)) for v in values.values() if _is_container(v)]
        return found


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
