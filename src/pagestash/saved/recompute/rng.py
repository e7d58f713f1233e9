"""Random number generators that a forward may draw from: torch's default ones, Python's and NumPy's."""

import random
import sys
from ctypes import CDLL, c_int, c_size_t, c_void_p
from typing import Any, NamedTuple

import torch
from torch import nn

from pagestash.saved.streams import capturing


class TorchRng(NamedTuple):
    """States of the host's generator and, on a GPU, the device's."""

    on_host: torch.Tensor
    position: tuple[int, int] | None = None
    """Seed and offset of the device's generator, which are all of its state."""
    on_device: torch.Tensor | None = None
    """Its state as torch has it, where the host may not ask for the position: in a capture."""


def own_generator(module: nn.Module) -> str | None:
    """The attribute of a module that has a generator of its own, which no replay would find as it was."""
    kinds: tuple[type, ...] = torch.Generator, random.Random
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += numpy.random.Generator, numpy.random.RandomState
    # (Not `isinstance`, which asks a proxy for the class of what it stands for.)
    return next((name for name, value in vars(module).items() if issubclass(type(value), kinds)), None)


PythonRng = tuple[Any, Any]
"""States of Python's generator and, where NumPy is imported, NumPy's."""


def torch_rng_state(device: torch.device) -> TorchRng:
    """The states now. (In a capture, the device's is the offset within the graph.)"""
    on_host = torch.default_generator.get_state()
    if device.type != "cuda":
        return TorchRng(on_host)
    position = _position(device)
    return TorchRng(on_host, position, torch.cuda.get_rng_state(device) if position is None else None)


def _position(device: torch.device) -> tuple[int, int] | None:
    if capturing() or device.index is None:
        return None
    generator = torch.cuda.default_generators[device.index]
    return generator.initial_seed(), generator.get_offset()


def set_torch_rng_state(device: torch.device, state: TorchRng) -> None:
    torch.set_rng_state(state.on_host)
    if state.position is not None:
        generator = torch.cuda.default_generators[device.index]
        seed, offset = state.position
        generator.manual_seed(seed)
        generator.set_offset(offset)
    elif state.on_device is not None:
        torch.cuda.set_rng_state(state.on_device, device)


def torch_rng_drawn(device: torch.device, before: TorchRng) -> bool:
    """Whether a generator of torch was drawn from since its state was `before`."""
    if not _same_bytes(before.on_host, torch.default_generator.get_state()):
        return True
    if before.position is not None:
        return before.position != _position(device)
    if before.on_device is None:
        return False
    return not torch.equal(before.on_device, torch.cuda.get_rng_state(device))


_memcmp = CDLL("msvcrt" if sys.platform == "win32" else None).memcmp
_memcmp.argtypes, _memcmp.restype = (c_void_p, c_void_p, c_size_t), c_int


def _same_bytes(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states are the same. (`torch.equal` takes several times as long.)"""
    size = state.nbytes
    return size == other.nbytes and not _memcmp(state.data_ptr(), other.data_ptr(), size)


def python_rng_state() -> PythonRng:
    """The states now. Takes some 50 µs."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_python_rng_state(state: PythonRng) -> None:
    of_python, of_numpy = state
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def python_rng_drawn(before: PythonRng) -> bool:
    """Whether Python's or NumPy's generator was drawn from since its state was `before`."""
    (of_python, of_numpy), (python_now, numpy_now) = before, python_rng_state()
    if of_python != python_now:
        return True
    if of_numpy is None or numpy_now is None:
        return False
    # (name, key array, position, whether a normal number waits, that number)
    return of_numpy[2:] != numpy_now[2:] or bool((of_numpy[1] != numpy_now[1]).any())
