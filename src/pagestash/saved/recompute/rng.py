"""Random number generators that a forward may draw from: torch's default ones, Python's and NumPy's."""

import random
import struct
import sys
from ctypes import CDLL, c_int, c_size_t, c_void_p, string_at
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


class PythonRngStates:
    """The states of Python's and NumPy's generators, read anew only if one was drawn from since."""

    def __init__(self) -> None:
        self._known: PythonRng | None = None
        self._place: Any = None

    def now(self) -> PythonRng:
        """The same object as before, if nothing was drawn. Takes a few µs then."""
        place = _place_in_python()
        if self._known is None or place is None or place != self._place or _has_normal(self._known):
            self._known = python_rng_state()
            self._place = _place_in_python()  # NumPy loads its generator when it is first asked
        return self._known


_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]
"""Python's generator."""
_HEAD = object.__basicsize__


def _in_memory(address: int) -> bytes:
    """The first words of Python's generator: how many of its block were drawn, and some of these."""
    return string_at(address + _HEAD, 32)


def _is_as_expected() -> bool:
    words = random.Random(1).getstate()[1]
    probe = random.Random(1)
    return _in_memory(id(probe)) == struct.pack("=i7I", words[-1], *words[:7])


_CAN_SEE = sys.implementation.name == "cpython" and _is_as_expected()


def _place_in_python() -> Any:
    """Where in their sequences the generators are, as far as a few words tell; None if that cannot be seen."""
    if not _CAN_SEE:
        return None
    place = _in_memory(id(_PYTHONS)), _PYTHONS.gauss_next
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return place
    bits = numpy.get_bit_generator()
    if type(bits) is not numpy.MT19937:
        return None
    # (624 words, and how many of them were drawn.)
    return *place, string_at(bits.ctypes.state_address + 2496 - 28, 32)


def _has_normal(state: PythonRng) -> bool:
    """Whether NumPy's generator gives out a number next that it has already made, which shows nowhere else."""
    return state[1] is not None and bool(state[1][3])
