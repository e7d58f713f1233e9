"""The device that a user names, and its memory."""

import torch

from pagestash.sizes import machine_memory


def find_device(name: str, option: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`, if the machine has it; errors begin with `option`."""
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
    """Total memory of the GPU, or of the machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_memory()


def memory_of_process(device: torch.device | str) -> int:
    """Bytes of its GPU that this process has or can have: those of its own allocator, and what is free, up to
    `torch.cuda.set_per_process_memory_fraction`."""
    free, total = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(torch.device(device).index)
    return min(free + torch.cuda.memory_reserved(device), int(fraction * total))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the GPU or the host ran out of memory."""
    ended = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return ended or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
