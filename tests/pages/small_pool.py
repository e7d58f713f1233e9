"""A pool of small pages full of poison, tensors that fill pages, and all that a refusal must leave alone."""

import torch
from support import same
from three_way import POISON

from pagestash.pages.pool import PagePool

PAGE = 64


def make(backend, device_pages=8, host_pages=0, page_bytes=PAGE):
    pool = PagePool("cpu", page_bytes, device_pages, host_pages, backend=backend)
    pool.memory.device_slab.fill_(POISON)
    pool.memory.host_slab.fill_(POISON)
    return pool


def pages(count, seed=0):
    """A float32 tensor that fills `count` pages, one a row."""
    return torch.randn(count, PAGE // 4, generator=torch.Generator().manual_seed(seed))


def snapshot(pool):
    """Everything that an operation which was refused must not have changed."""
    memory = pool.memory
    tensors = (memory.state, memory.accounts, memory.overflow, memory.device_ring, memory.host_ring)
    return pool.stats(), pool.live_tickets, [tensor.clone() for tensor in tensors]


def assert_unchanged(pool, before):
    stats, live, tensors = snapshot(pool)
    assert (stats, live) == before[:2]
    assert same(tensors, before[2])
