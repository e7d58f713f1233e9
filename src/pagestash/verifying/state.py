"""A copy of all that a step may change, from which each run begins and which is restored at the end."""

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pagestash.device import memory_of_process
from pagestash.saved.recompute.rng import python_rng_state
from pagestash.saved.storage import plain_storage
from pagestash.saved.weight_sums import memory_of
from pagestash.step.state import ProtectedState, generator_state, set_generator_state
from pagestash.verifying.contents import Container, Item, is_array, is_generator

DEVICE_PART = 0.25
"""The copy is on the device if it takes no more than this part of what is free there: steps need room, too."""


class State:
    """The contents of containers, tensors and arrays, and all random states, as they are now."""

    def __init__(self, items: Sequence[Item], model: nn.Module, device: torch.device) -> None:
        values = [item.value for item in items]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        # (A tensor with a graph has no gradient, and would warn that it was asked for one.)
        self._tensors = [
            (tensor, tensor.detach(), tensor.requires_grad, tensor.grad if tensor.is_leaf else None)
            for tensor in tensors
        ]
        self._containers = [(value, _copy(value)) for value in values if isinstance(value, Container)]
        self._arrays = [(value, value.copy()) for value in values if is_array(value)]
        held = [*tensors, *(gradient for *_, gradient in self._tensors if gradient is not None)]
        self._memory = ProtectedState(held, device, on_host=not _has_room(device, held))
        self._memory.remember()
        python_rng_state()  # NumPy loads its generator on first use, which would be within a run
        self._generators = generator_states(values)
        self._torch = torch_states()
        self._sharded: list[Any] = [module for module in model.modules() if _is_fsdp_unit(module)]

    def put_back(self) -> None:
        """Restore all of it, in place: whoever refers to a tensor or a container sees what it was."""
        for module in self._sharded:
            module.reshard()  # an exception may have left it gathered
        for value, before in self._containers:
            _restore(value, before)
        for tensor, memory, requires_grad, gradient in self._tensors:
            if type(memory) is torch.Tensor and plain_storage(tensor) != plain_storage(memory):
                tensor.data = memory
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = gradient
        self._memory.put_back()
        for array, copy in self._arrays:
            if array.flags.writeable:
                array[...] = copy
        for generator, before in self._generators:
            set_generator_state(generator, before)
        for name, state in self._torch.items():
            _set_torch_state(name, state)


def generator_states(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Those of Python's and NumPy's global generators, and of the generators among `values`, with their states."""
    world = [random, *filter(None, [sys.modules.get("numpy.random")])]
    own = {id(value): value for value in values if is_generator(value)}
    return [(each, generator_state(each)) for each in (*world, *own.values())]


def torch_states() -> dict[str, torch.Tensor]:
    """The states of torch's default generators by their devices; a GPU's only if it was used."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_torch_state(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def _has_room(device: torch.device, tensors: Sequence[torch.Tensor]) -> bool:
    if device.type != "cuda":
        return True
    free = memory_of_process(device) - torch.cuda.memory_allocated(device)
    return sum(part.nbytes for tensor in tensors for part in memory_of(tensor)) <= DEVICE_PART * free


def _is_fsdp_unit(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _restore(value: Any, before: Any) -> None:
    """Restore a container's contents, if they are not the very objects that it had."""
    if isinstance(value, dict):
        if list(value) != list(before) or any(value[key] is not before[key] for key in before):
            value.clear()
            value.update(before)
    elif isinstance(value, set):
        if value != before:
            value.clear()
            value.update(before)
    elif len(value) != len(before) or any(now is not own for now, own in zip(value, before)):
        value.clear()
        value.extend(before)
