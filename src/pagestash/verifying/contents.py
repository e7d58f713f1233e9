"""Everything that a step may change: what modules, an optimizer and a batch hold, each with a name.

Modules and plain containers are looked into, and objects of the packages that the model's classes come from: their
`__dict__`, not their slots. Objects of other packages are left alone, because a thread may be using them.
"""

import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from pagestash.saved.names import plain_names
from pagestash.saved.recompute.trees import PLAIN_VALUES

Kind = Literal[
    "loss",
    "gradient",
    "parameter",
    "buffer",
    "optimizer state",
    "random state",
    "attribute",
    "argument",
    "internal",
]
"""`internal`: an attribute of a module of pagestash, where a keeper leaves things; restored, but not compared."""
Container = dict | list | set | deque

_PARTS: dict[str, Kind] = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "attribute"}
_OF_TORCH = vars(nn.Module()).keys()


class Item(NamedTuple):
    """A tensor, a generator, an array or a container, and where it is: `layers.3.norm.running_mean`."""

    name: str
    kind: Kind
    value: Any


def contents(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, arguments: Mapping[str, Any]
) -> list[Item]:
    """Each once: modules in order, then the optimizer and the arguments of the step."""
    roots = [Item("", "attribute", model), Item("optimizer", "optimizer state", optimizer)]
    roots += [Item(name, "argument", value) for name, value in arguments.items()]
    return list(_Walk(model).items(roots))


class _Walk:
    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[int, Any] = {}
        """By id. The objects, too: an id is that of its object only while that lives."""
        self._plain = {id(module): name for name, module in plain_names(model)}
        self._tensors: dict[int, str] = {}
        self._packages = {_package(module) for module in model.modules()} - {"torch", "pagestash"}

    def items(self, roots: list[Item]) -> Iterator[Item]:
        """In depth. With a list, since a structure may be deeper than Python's stack."""
        waiting = roots[::-1]
        while waiting:
            item = waiting.pop()
            name, kind, value = item
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                self._tensors[id(value)] = name
                yield item
            elif is_generator(value):
                yield item._replace(kind="random state")
            elif is_array(value):
                yield item
            elif isinstance(value, nn.Module):
                name = self._plain.get(id(value), name)
                kind = "internal" if _package(value) == "pagestash" else "attribute"
                yield Item(name, kind, vars(value))
                # Hooks, too: what they refer to is not looked into.
                yield from (
                    Item(_joined(name, key), kind, own)
                    for key, own in vars(value).items()
                    if key in _OF_TORCH and isinstance(own, Container)
                )
                waiting += reversed(list(_of_module(name, kind, value)))
            else:
                if isinstance(value, torch.optim.Optimizer) or self._is_users(value):
                    waiting.append(Item(name, kind, vars(value)))
                if isinstance(value, Container):
                    yield item
                if isinstance(value, Container | tuple):
                    waiting += reversed(list(self._inside(item)))

    def _inside(self, item: Item) -> Iterator[Item]:
        pairs = item.value.items() if isinstance(item.value, dict) else enumerate(item.value)
        for key, value in pairs:
            if type(value) not in PLAIN_VALUES:
                part = key if type(key) in PLAIN_VALUES else self._tensors.get(id(key), type(key).__name__)
                yield Item(_joined(item.name, part), item.kind, value)

    def _is_users(self, value: Any) -> bool:
        return (
            _package(value) in self._packages and hasattr(value, "__dict__") and not isinstance(value, type)
        )


def _of_module(name: str, kind: Kind, module: nn.Module) -> Iterator[Item]:
    for key, value in vars(module).items():
        if key in _PARTS:
            for own, each in value.items():
                yield Item(_joined(name, own), _PARTS[key], each)
        elif key not in _OF_TORCH and type(value) not in PLAIN_VALUES:
            yield Item(_joined(name, key), kind, value)


def is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def is_array(value: Any) -> bool:
    """Whether this is a NumPy array (without loading NumPy)."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _joined(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)
