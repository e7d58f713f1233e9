"""Random number generators that a forward may draw from: torch's default ones, Python's and NumPy's."""

import random
import struct
import sys
from collections import deque
from ctypes import CDLL, c_char, c_int, c_size_t, c_void_p
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pagestash.saved.recompute.undo import Undo
from pagestash.saved.streams import capturing


class TorchRng(NamedTuple):
    """States of the host's generator and, on a GPU, the device's."""

    on_host: torch.Tensor
    position: tuple[int, int] | None = None
    """Seed and offset of the device's generator, which are all of its state."""
    on_device: torch.Tensor | None = None
    """Its state as torch has it, where the host may not ask for the position: in a capture."""


PythonRng = tuple[Any, Any]
"""States of Python's generator and, where NumPy is imported, NumPy's."""


class Random:
    """The states of the generators that a forward may draw from, before it."""

    def __init__(self, device: torch.device, python: "PythonRngStates") -> None:
        self._device = device
        self._states = python
        self.torch: TorchRng | None = torch_rng_state(device)
        self.python: PythonRng | None = python.now()

    def keep_drawn(self) -> None:
        """Let go of the states that have not changed since."""
        if self.torch is not None and not torch_rng_drawn(self._device, self.torch):
            self.torch = None
        if self._states.now() is self.python:
            self.python = None

    def now(self) -> "Random":
        """The states now of the generators that have one here."""
        now = Random(self._device, self._states)
        now.torch = self.torch and now.torch
        now.python = self.python and now.python
        return now

    def restore(self, undo: Undo) -> None:
        """The generators that forward drew from are as before it; `undo`: as they are now."""
        if self.torch is not None:
            undo.append(partial(set_torch_rng_state, self._device, torch_rng_state(self._device)))
        if self.python is not None:
            undo.append(partial(set_python_rng_state, python_rng_state()))
        self.set()

    def set(self) -> None:
        """Set those that have a state here."""
        if self.torch is not None:
            set_torch_rng_state(self._device, self.torch)
        if self.python is not None:
            set_python_rng_state(self.python)


def own_generator(module: nn.Module) -> str | None:
    """The attribute of a module that has a generator of its own, which no replay would find as it was.

    Also one in a list, dict or deque.
    """
    for name, value in vars(module).items():
        # (Not `isinstance`, which asks a proxy for the class of what it stands for.)
        if issubclass(type(value), dict):
            entries = value.values()
        else:
            entries = value if issubclass(type(value), (list, deque)) else ()
        if any(map(is_generator, (value, *entries))):
            return name
    return None


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers: torch's, Python's or NumPy's."""
    kinds: tuple[type, ...] = torch.Generator, random.Random
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += numpy.random.Generator, numpy.random.RandomState
    return issubclass(type(value), kinds)


# --- torch's ---


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


# --- Python's and NumPy's ---


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
    """The states of Python's and NumPy's generators, read anew only if one was drawn from since.

    Few words of a generator's memory tell that: how many numbers of its block it gave out, and some of these.
    """

    def __init__(self) -> None:
        self._known: PythonRng | None = None
        self._place: Any = None
        self._numpys: Any = None
        """NumPy's generator, which may be another later."""
        self._words: Any = None

    def now(self) -> PythonRng:
        """The same object as before, if nothing was drawn. Takes 1 µs then."""
        place = self._place_now()
        known = self._known
        # (NumPy may give out a number next that it has already made, which shows nowhere else.)
        if known is None or place is None or place != self._place or (known[1] is not None and known[1][3]):
            known = self._known = python_rng_state()
            self._place = self._place_now()  # NumPy loads its generator when it is first asked
        return known

    def _place_now(self) -> Any:
        """Where in their sequences the generators are, as far as a few words tell; None if that cannot be seen."""
        if _PYTHONS_WORDS is None:
            return None
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return _PYTHONS_WORDS.raw, _PYTHONS.gauss_next
        bits = numpy.get_bit_generator()
        if bits is not self._numpys:
            if type(bits) is not numpy.MT19937:
                return None
            self._numpys = bits
            # (624 words, and how many of them were drawn.)
            self._words = _Words.from_address(bits.ctypes.state_address + 2496 - 28)
        return _PYTHONS_WORDS.raw, _PYTHONS.gauss_next, self._words.raw


_Words = c_char * 32
_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]
"""Python's generator."""


def _words_of(generator: random.Random) -> Any:
    """The first words of a generator of Python, where they are; None if they are elsewhere."""
    if sys.implementation.name != "cpython":
        return None
    words = _Words.from_address(id(generator) + object.__basicsize__)
    numbers = generator.getstate()[1]
    return words if words.raw == struct.pack("=i7I", numbers[-1], *numbers[:7]) else None


_PYTHONS_WORDS = _words_of(_PYTHONS)
