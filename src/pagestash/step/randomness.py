"""Generators of random numbers that a step draws from, besides torch's default ones."""

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class Generators:
    """Python's and numpy's global generators, and those that were passed or that `train_step` refers to."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self.others = list({id(other): other for other in others}.values())
        for other in self.others:
            if not is_generator(other):
                raise ValueError(
                    f"generators: {other!r}: expected a torch.Generator, a numpy Generator or "
                    "RandomState, or a random.Random"
                )

    @property
    def on_devices(self) -> list[torch.Generator]:
        """The generators that a CUDA graph draws from; they are registered with the graph."""
        return [g for g in self.others if isinstance(g, torch.Generator) and g.device.type == "cuda"]

    def state(self) -> list[tuple[Any, Any]]:
        """Each generator with its state."""
        numpy = sys.modules.get("numpy.random")
        world = [random] if numpy is None else [random, numpy]
        return [(each, _state(each)) for each in (*world, *self.others)]

    def state_of_graphs(self) -> list[tuple[Any, Any]]:
        """The same for the generators that a graph replay draws from; the host runs no code of the step then."""
        return [(each, _state(each)) for each in self.on_devices]


def set_state(state: list[tuple[Any, Any]]) -> None:
    """Restore generators to saved states."""
    for generator, each in state:
        _set_state(generator, each)


def is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def _state(generator: Any) -> Any:
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
