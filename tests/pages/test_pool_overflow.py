"""A pool that is too small says so, takes nothing, and tells what would have sufficed."""

import math

import pytest
import torch
from small_pool import PAGE, make, pages
from support import same
from three_way import POISON


def test_overflow_is_a_float_scalar_that_stays_set_until_reset(backend):
    pool = make(backend, device_pages=2)
    assert (pool.overflow.shape, pool.overflow.dtype) == (torch.Size([]), torch.float32)
    assert pool.overflow.item() == 0.0
    refused = pool.stash([pages(3)])
    assert pool.overflow.item() == 1.0
    pool.release(refused)
    pool.release(pool.stash([pages(1)]))
    assert pool.overflow.item() == 1.0
    assert pool.stats().overflow
    pool.reset()
    assert pool.overflow.item() == 0.0
    assert not pool.stats().overflow


def test_overflow_tensor_is_the_same_object_through_growth_and_reset(backend):
    """An optimizer that was given it as `found_inf` keeps seeing it."""
    pool = make(backend, device_pages=1)
    flag = pool.overflow
    pool.grow(device_pages=2)
    pool.stash([pages(3)])
    assert flag.item() == 1.0
    pool.reset()
    assert flag.item() == 0.0


def test_fused_optimizer_skips_the_step_that_overflowed(backend):
    pool = make(backend, device_pages=1)
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    optimizer.found_inf = pool.overflow
    optimizer.grad_scale = None

    def step():
        parameter.grad = torch.full((5,), 2.0)
        optimizer.step()
        return parameter.detach().clone()

    first = step()
    assert not torch.equal(first, torch.ones(5))
    pool.stash([pages(2)])
    moments = [optimizer.state[parameter][name].clone() for name in ("exp_avg", "exp_avg_sq", "step")]
    assert torch.equal(step(), first)
    kept = [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq", "step")]
    assert same(kept, moments)
    pool.reset()
    assert not torch.equal(step(), first)


def test_a_group_that_does_not_fit_takes_nothing(backend):
    pool = make(backend, device_pages=4, host_pages=1)
    pool.stash([pages(2)])
    ring = pool.memory.device_ring.clone()
    pool.stash([pages(1), pages(3)])  # the first alone would fit
    stats = pool.stats()
    assert (stats.device.in_use, stats.host.in_use, stats.refused_groups) == (2, 0, 1)
    assert torch.equal(pool.memory.device_ring, ring)
    assert bool((pool.memory.device_slab[2 * PAGE :] == POISON).all())
    pool.stash([pages(3)])  # and what does fit afterwards is served
    assert pool.stats().host.in_use == 1


@pytest.mark.parametrize("host_pages", [0, 2])
def test_wanted_peak_is_the_pool_that_would_have_sufficed(backend, host_pages):
    def work(pool):
        first = pool.stash([pages(3)])
        second = pool.stash([pages(2), pages(4)], rows=torch.tensor(3))
        pool.release(first)
        third = pool.stash([pages(4)])
        pool.release(second + third)
        return pool.stats()

    short = work(make(backend, device_pages=2, host_pages=host_pages))
    assert short.overflow
    assert short.device.wanted == 9  # 3 + 5 with the second group, 5 + 4 with the third
    assert short.host.wanted == 7
    enough = work(make(backend, device_pages=short.device.wanted))
    assert not enough.overflow
    assert enough.device.peak == short.device.wanted
    spilling = work(make(backend, device_pages=2, host_pages=short.host.wanted))
    assert not spilling.overflow
    one_less = work(make(backend, device_pages=short.device.wanted - 1))
    assert one_less.overflow


@pytest.mark.parametrize(("fill", "expected"), [(0.0, 0.0), (None, 0.0), (2.5, 2.5)])
def test_refused_tickets_restore_as_fill_or_zeros(backend, fill, expected):
    pool = make(backend, device_pages=1)
    x = pages(3)
    tickets = pool.stash([x, torch.arange(7)])
    buffers = [torch.full_like(x, math.nan), torch.full((7,), -1)]
    pool.restore_into(tickets, buffers, fill)
    assert torch.equal(buffers[0], torch.full_like(x, expected))
    assert torch.equal(buffers[1], torch.full((7,), int(expected)))


def test_reset_counts_peaks_from_what_is_in_use(backend):
    pool = make(backend, device_pages=4, host_pages=4)
    held = pool.stash([pages(1)], account=2)
    pool.release(pool.stash([pages(5)], account=2))
    assert (pool.stats().device.peak, pool.stats().host.peak, pool.stats().device.wanted) == (4, 2, 6)
    pool.reset()
    stats = pool.stats()
    assert (stats.device.peak, stats.host.peak, stats.device.wanted, stats.spilled_bytes) == (1, 0, 1, 0)
    assert (stats.valid_bytes, stats.valid_bytes_peak) == (PAGE, PAGE)
    assert pool.memory.accounts[2].tolist() == [PAGE, PAGE]
    assert len(held) == pool.live_tickets == 1
