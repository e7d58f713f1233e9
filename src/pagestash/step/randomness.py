"""Random numbers that a step draws on the host, besides torch's default generators."""

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class Generators:
    """Python's and numpy's global generators, and others that the step was seen or said to draw from."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self.others = list({id(other): other for other in others}.values())
        for other in self.others:
            if not is_generator(other):
                raise ValueError(
                    f"generators: {type(other).__name__} is none; expected a torch.Generator, a numpy Generator or "
                    "RandomState, or a random.Random"
                )

    @property
    def on_devices(self) -> list[torch.Generator]:
        """Those that a CUDA graph draws from: a graph must know them."""
        return [g for g in self.others if isinstance(g, torch.Generator) and g.device.type == "cuda"]

    def state(self) -> list[tuple[Any, Any]]:
        """Each of them, and where it stands."""
        numpy = sys.modules.get("numpy.random")
        world = [random] if numpy is None else [random, numpy]
        return [(each, _state(each)) for each in (*world, *self.others)]

    def state_of_graphs(self) -> list[tuple[Any, Any]]:
        """The same for those that a replay draws from: the host runs none of the step's code then."""
        return [(each, _state(each)) for each in self.on_devices]


def set_state(state: list[tuple[Any, Any]]) -> None:
    """Put generators back to where they stood."""
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
