"""The device that a user names, and its memory."""

import torch

from pagestash.policy import machine_memory


def find_device(name: str, option: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device that is here; `option` is how an error calls it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{option}: expected auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{option}: expected auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{option}: there is no GPU here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{option}: there are {torch.cuda.device_count()} GPUs here")
    return device


def device_memory(device: torch.device) -> int:
    """Bytes that the device has in all: the GPU's, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_memory()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    ended = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return ended or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
