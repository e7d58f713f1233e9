"""Pinned host memory of exactly the requested size."""

import mmap
import weakref

import torch

_MAPPED_AND_PORTABLE = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def host_slab(size: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor of `size` bytes in host memory, pinned if `device` is a GPU.

    `torch.empty(pin_memory=True)` rounds up to a power of two, up to 1.9 times the requested size. This maps
    ordinary pages and registers them, which copies just as fast. They are unregistered when the tensor's memory
    is freed.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # An anonymous map and not malloc: it starts at a page boundary, so registering it pins no other memory.
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"host pages: cannot map {size:,} bytes of host memory ({error})") from error
    slab = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(slab.data_ptr(), size, _MAPPED_AND_PORTABLE)
        if int(status) != 0:
            raise MemoryError(
                f"host pages: the driver refused to pin {size:,} bytes (cudaHostRegister: {status}); "
                "ask for fewer host pages, or raise the locked-memory limit (ulimit -l)"
            )
        # The storage keeps the map alive. The finalizer runs when the last view is gone, before the map is closed.
        weakref.finalize(memory, _unregister, slab.data_ptr())
    return slab


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
