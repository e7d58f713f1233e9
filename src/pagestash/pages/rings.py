"""The ring of free page ids that each tier has on the device, and how it grows."""

import torch

from pagestash.kernels.pages.layout import Counter, PoolMemory


def ids(first: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` page ids from `first` on."""
    return torch.arange(first, first + count, dtype=torch.int32, device=device)


def grown_ring(memory: PoolMemory, pages: int, base: int) -> torch.Tensor:
    """A tier's ring at its new length, with position and count adjusted; reads nothing back.

    Only the device knows how many of the old ids are free. New ids come first and old ones last, so that the count
    alone says where the free ids end.
    """
    ring, head, free = (
        (memory.host_ring, Counter.HOST_HEAD, Counter.HOST_FREE)
        if base
        else (memory.device_ring, Counter.DEVICE_HEAD, Counter.DEVICE_FREE)
    )
    state, old = memory.state, ring.numel()
    at = (torch.arange(old, device=ring.device) + state[head]) % max(old, 1)
    grown = torch.cat([ids(base + old, pages - old, ring.device), ring[at]])
    state[head].zero_()
    state[free] += pages - old
    return grown
