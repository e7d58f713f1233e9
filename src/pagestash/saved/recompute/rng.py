"""Random number generators that a forward may draw from: torch's default ones, Python's and NumPy's."""

import random
import sys
from typing import Any

import torch

TorchRng = tuple[torch.Tensor, torch.Tensor | None]
"""States of the host's generator and, on a GPU, the device's."""

PythonRng = tuple[Any, Any]
"""States of Python's generator and, where NumPy is imported, NumPy's."""


def torch_rng_state(device: torch.device) -> TorchRng:
    """The states now. (In a capture, the device's is the offset within the graph.)"""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def set_torch_rng_state(device: torch.device, state: TorchRng) -> None:
    on_host, on_device = state
    torch.set_rng_state(on_host)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)


def torch_rng_drawn(device: torch.device, before: TorchRng) -> bool:
    """Whether a generator of torch was drawn from since its state was `before`."""
    (on_host, on_device), (host_now, device_now) = before, torch_rng_state(device)
    if not torch.equal(on_host, host_now):
        return True
    return on_device is not None and device_now is not None and not torch.equal(on_device, device_now)


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
