"""Pinned host memory of exactly the requested size."""

import mmap
import sys
import weakref
from collections.abc import Callable

import torch

MakeSlab = Callable[[int, torch.device], torch.Tensor]
"""Makes a slab, as `host_slab` does."""

_MAPPED_AND_PORTABLE = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def host_slab(size: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor of `size` bytes in host memory, pinned if `device` is a GPU.

    `torch.empty(pin_memory=True)` rounds up to a power of two, up to 1.9 times the requested size. This maps
    ordinary pages and registers them, which copies just as fast. They are unregistered when the tensor's memory
    is freed.
    """
    return _tensor_in(_mapped(size, device)) if size else torch.empty(0, dtype=torch.uint8)


def _tensor_in(memory: mmap.mmap | memoryview) -> torch.Tensor:
    """All of it. The tensor's storage keeps it alive."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped(size: int, device: torch.device) -> "_Map":
    # An anonymous map and not malloc: it starts at a page boundary, so registering it pins no other memory.
    try:
        memory = _Map(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"host pages: cannot map {size:,} bytes of host memory ({error})") from error
    if device.type == "cuda":
        address = _tensor_in(memory).data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, size, _MAPPED_AND_PORTABLE)
        if int(status) != 0:
            raise MemoryError(
                f"host pages: the driver refused to pin {size:,} bytes (cudaHostRegister: {status}); "
                "ask for fewer host pages, or raise the locked-memory limit (ulimit -l)"
            )
        memory.address = address
    return memory


class _Map(mmap.mmap):
    """An anonymous map, which the driver may have pinned."""

    address: int | None = None
    """Where it is, if it is pinned."""

    def __del__(self) -> None:
        # The last tensor in it is gone. (A finalizer would run when its pages may be somebody else's by now.)
        if self.address is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


class SpareSlab:
    """Makes slabs for one user after another: the next gets the memory of the one before, if that is gone.

    To pin memory takes about a second for a few GiB. Of memory that is more than twice as large as the next slab,
    too much would stay pinned: it is freed.
    """

    def __init__(self) -> None:
        self._memory: _Map | None = None
        self._given: weakref.ref[memoryview] | None = None
        """Alive as long as a tensor in it is."""

    def __call__(self, size: int, device: torch.device) -> torch.Tensor:
        in_use = self._given is not None and self._given() is not None
        if device.type != "cuda" or in_use or not size:
            return host_slab(size, device)
        if self._memory is not None:
            torch.cuda.synchronize(device)  # copies of the one before, if an error ended it, may still run
        if self._memory is None or not size <= len(self._memory) <= 2 * size:
            self._memory = None  # before there is another
            self._memory = _mapped(size, device)
        given = memoryview(self._memory)[:size]
        self._given = weakref.ref(given)
        return _tensor_in(given)
