"""What a page pool promises, one promise a test."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from small_pool import PAGE, assert_unchanged, make, pages, snapshot
from support import same
from three_way import POISON, as_bytes

from pagestash.kernels.pages import release as release_kernels
from pagestash.kernels.pages.layout import HOST_BASE, Counter
from pagestash.pages.host import host_slab

# --- stash and restore ------------------------------------------------------------------------------------------


def test_restored_rows_are_the_stashed_ones_and_the_tail_is_zero(backend):
    pool = make(backend)
    x = pages(4)
    x[3:] = math.nan
    (ticket,) = pool.stash([x], rows=3)
    (back,) = pool.restore([ticket])
    assert torch.equal(back[:3], x[:3])
    assert torch.equal(back[3:], torch.zeros(1, PAGE // 4))


def test_restore_may_be_called_again_and_gives_no_page_up(backend):
    pool = make(backend)
    x = pages(4)
    tickets = pool.stash([x])
    before = pool.stats()
    for _ in range(2):
        assert torch.equal(pool.restore(tickets)[0], x)
    assert pool.stats() == before


def test_without_fill_the_tail_of_the_buffer_is_not_written(backend):
    pool = make(backend)
    x = pages(4)
    tickets = pool.stash([x], rows=torch.tensor(1))
    buffer = torch.full_like(x, 7.0)
    pool.restore_into(tickets, [buffer], fill=None)
    assert torch.equal(buffer[:1], x[:1])
    assert torch.equal(buffer[1:], torch.full_like(x[1:], 7.0))


@pytest.mark.parametrize("rows", [-5, 0, 3, 4, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_device_rows_out_of_range_count_as_the_nearest_in_range(backend, rows, dtype):
    pool = make(backend)
    x, valid = pages(4), min(max(rows, 0), 4)
    tickets = pool.stash([x], rows=torch.tensor([rows], dtype=dtype))
    assert pool.stats().device.in_use == valid
    (back,) = pool.restore(tickets)
    assert torch.equal(back[:valid], x[:valid])
    assert back[valid:].count_nonzero() == 0


def test_each_tensor_of_a_group_may_have_rows_of_its_own(backend):
    pool = make(backend, device_pages=16)
    n = torch.tensor(2, dtype=torch.int32)
    tensors = [pages(4, seed) for seed in range(4)]
    tickets = pool.stash(tensors, rows=[None, 1, n, n])
    for back, x, valid in zip(pool.restore(tickets), tensors, (4, 1, 2, 2)):
        assert torch.equal(back, torch.cat([x[:valid], torch.zeros_like(x[valid:])]))


def test_rounding_costs_less_than_a_page_a_tensor(backend):
    pool = make(backend)
    pool.stash([torch.zeros(PAGE + 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.bool)])
    assert pool.stats().device.in_use == 3
    assert pool.stats().valid_bytes == PAGE + 2


def test_empty_groups_and_empty_tensors_take_nothing(backend):
    pool = make(backend)
    assert pool.stash([]) == []
    assert pool.restore([]) == []
    pool.release([])
    tickets = pool.stash([torch.empty(0, 3), torch.empty(5, 0), torch.empty(0)], rows=torch.tensor(4))
    assert pool.stats().device.in_use == 0
    assert [tuple(back.shape) for back in pool.restore(tickets)] == [(0, 3), (5, 0), (0,)]
    pool.release(tickets)


def test_a_stash_keeps_no_graph_and_no_alias(backend):
    pool = make(backend)
    x = pages(2).requires_grad_()
    tickets = pool.stash([x * 1.0])
    before = x.detach().clone()
    x.data.zero_()
    (back,) = pool.restore(tickets)
    assert torch.equal(back, before)
    assert not back.requires_grad


# --- tiers ------------------------------------------------------------------------------------------------------


def test_device_pages_go_first_and_host_pages_take_the_rest_page_by_page(backend):
    pool = make(backend, device_pages=3, host_pages=4)
    x = pages(5)
    tickets = pool.stash([x])
    stats = pool.stats()
    assert (stats.device.in_use, stats.host.in_use, stats.spilled_bytes) == (3, 2, 2 * PAGE)
    assert not stats.overflow
    assert torch.equal(pool.memory.host_slab[: 2 * PAGE], as_bytes(x[3:]))
    assert torch.equal(pool.restore(tickets)[0], x)


@pytest.mark.parametrize("tensors", [1, 11], ids=["one tensor", "more than one launch"])
def test_a_spill_left_for_later_moves_host_pages_only(backend, tensors):
    pool = make(backend, device_pages=tensors, host_pages=tensors + 2)
    x = pages(2 * tensors)
    parts = list(x.chunk(tensors))
    tickets = pool.stash(parts, host_later=True)
    assert bool((pool.memory.host_slab == POISON).all())
    assert torch.equal(pool.memory.device_slab, as_bytes(x[:tensors]))
    pool.memory.device_slab.fill_(0)  # a spill that touched a device page would put it right
    pool.spill(tickets, parts)
    assert torch.equal(pool.memory.host_slab[: tensors * PAGE], as_bytes(x[tensors:]))
    assert pool.memory.device_slab.count_nonzero() == 0


def test_each_half_of_a_restore_writes_only_its_own_bytes(backend):
    pool = make(backend, device_pages=3, host_pages=4)
    x = pages(6)
    tickets = pool.stash([x], rows=5)
    buffer = torch.full_like(x, 7.0)
    pool.restore_into(tickets, [buffer], tiers="host")
    assert torch.equal(buffer[3:5], x[3:5])
    assert bool((buffer[:3] == 7).all())
    assert bool((buffer[5:] == 7).all())
    pool.restore_into(tickets, [buffer], tiers="device")
    assert torch.equal(buffer, torch.cat([x[:5], torch.zeros(1, PAGE // 4)]))
    buffer.fill_(7.0)
    pool.restore_into(tickets, [buffer], tiers="device")
    assert torch.equal(buffer[:3], x[:3])
    assert bool((buffer[3:5] == 7).all())
    assert buffer[5:].count_nonzero() == 0


@pytest.mark.parametrize("size", [1, 4097, 3 * 2**20 + 48])
def test_host_slab_has_exactly_the_size_asked_for(size):
    slab = host_slab(size, torch.device("cpu"))
    assert slab.numel() == size
    assert slab.untyped_storage().nbytes() == size
    slab.fill_(POISON)


def test_host_memory_lives_as_long_as_the_slab():
    slab = host_slab(1 << 20, torch.device("cpu"))[-16:].fill_(3)
    assert slab.tolist() == [3] * 16


def test_accounts_tell_regions_apart(backend):
    pool = make(backend, device_pages=16)
    one = pool.stash([pages(2)], account=1)
    pool.stash([pages(3)], rows=1, account=4095)
    pool.release(one)
    assert pool.memory.accounts[[0, 1, 4095]].tolist() == [[0, 0], [0, 2 * PAGE], [PAGE, PAGE]]


# --- release ----------------------------------------------------------------------------------------------------


def test_releasing_twice_is_an_error_and_changes_nothing(backend):
    pool = make(backend)
    first, second = pool.stash([pages(1), pages(2)])
    pool.release([first])
    before = snapshot(pool)
    with pytest.raises(ValueError, match=r"tickets\[1\] was released before"):
        pool.release([second, first])
    with pytest.raises(ValueError, match=r"tickets\[0\] was released before: cannot restore it"):
        pool.restore([first])
    with pytest.raises(ValueError, match="twice"):
        pool.release([second, second])
    assert_unchanged(pool, before)
    pool.release([second])
    assert pool.stats().device.in_use == 0


def test_releasing_twice_on_the_device_is_harmless(backend):
    """What a replayed graph may do."""
    pool = make(backend, device_pages=4, host_pages=4)
    tickets = pool.stash([pages(3), pages(2)]) + pool.stash([pages(9)])
    groups = {id(ticket.group): ticket.group for ticket in tickets}.values()
    pool.release(tickets)
    before = snapshot(pool)
    for group in groups:
        members = list(range(len(group.spans)))
        release_kernels.release(pool.memory, group.spans, members, group.book, group.account)
    assert_unchanged(pool, before)


def test_pages_come_back_first_in_first_out(backend):
    pool = make(backend, device_pages=6)
    first, second, third = (pool.stash([pages(2)])[0] for _ in range(3))
    pool.release([third])
    pool.release([first])
    (again,) = pool.stash([pages(3)])
    table = again.group.book[again.span.table :][:3].tolist()
    assert table == [4, 5, 0]
    assert torch.equal(pool.restore([second])[0], pages(2))


# --- growing ----------------------------------------------------------------------------------------------------


def test_growing_keeps_live_tickets_of_both_tiers(backend):
    pool = make(backend, device_pages=3, host_pages=3)
    pool.release(pool.stash([pages(2)]))  # the ring no longer starts at 0
    x, y = pages(4, 1), pages(1, 2)
    tickets = pool.stash([x]) + pool.stash([y])
    books = [ticket.group.book.clone() for ticket in tickets]
    old = (pool.memory.device_slab, pool.memory.host_slab)
    pool.grow(device_pages=5, host_pages=7)
    for slab in old:
        slab.fill_(POISON)
    assert (pool.device_pages, pool.host_pages) == (5, 7)
    assert same([ticket.group.book for ticket in tickets], books)
    back = pool.restore(tickets)
    assert torch.equal(back[0], x)
    assert torch.equal(back[1], y)
    z = pages(7, 3)
    more = pool.stash([z])
    assert not pool.stats().overflow
    assert (pool.stats().device.in_use, pool.stats().host.in_use) == (5, 7)
    assert same(pool.restore(tickets + more), (x, y, z))


def test_growing_makes_room_for_what_was_refused(backend):
    pool = make(backend, device_pages=2)
    pool.release(pool.stash([pages(5)]))
    pool.grow(device_pages=pool.stats().device.wanted)
    pool.reset()
    x = pages(5)
    assert torch.equal(pool.restore(pool.stash([x]))[0], x)
    assert not pool.stats().overflow


def test_a_pool_only_grows(backend):
    pool = make(backend, device_pages=4, host_pages=2)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="device_pages=3: the pool has 4"):
        pool.grow(device_pages=3)
    with pytest.raises(ValueError, match="host_pages=1: the pool has 2"):
        pool.grow(device_pages=9, host_pages=1)
    with pytest.raises(ValueError, match=f"device_pages={HOST_BASE}: at most"):
        pool.grow(device_pages=HOST_BASE)
    assert_unchanged(pool, before)
    assert (pool.device_pages, pool.host_pages) == (4, 2)


def test_a_growth_that_does_not_fit_in_memory_leaves_the_pool_working(backend, monkeypatch):
    pool = make(backend, device_pages=4)
    before = snapshot(pool)
    allocate = torch.empty

    def refuse(*args, **kwargs):
        if args and args[0] == 100 * PAGE:
            raise torch.OutOfMemoryError("no room")
        return allocate(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    for grow in (pool.grow, pool.resize):
        with pytest.raises(torch.OutOfMemoryError):
            grow(device_pages=100)
    assert_unchanged(pool, before)
    x = pages(4)
    assert torch.equal(pool.restore(pool.stash([x]))[0], x)


def test_resize_sets_the_exact_size_of_an_empty_pool(backend):
    pool = make(backend, device_pages=4)
    held = pool.stash([pages(3)])
    with pytest.raises(ValueError, match="device_pages=2: 1 tickets are live"):
        pool.resize(2)
    pool.release(held)
    with pytest.raises(ValueError, match="device_pages=0"):
        pool.resize(0)
    for size in (2, 7):
        pool.resize(size)
        assert pool.device_pages == size
        assert pool.memory.device_slab.numel() == size * PAGE
        x = pages(size)
        tickets = pool.stash([x])
        assert torch.equal(pool.restore(tickets)[0], x)
        assert (pool.stats().device.in_use, pool.stats().overflow) == (size, False)
        pool.release(tickets)


def test_two_pools_do_not_mix(backend):
    small, large = make(backend, device_pages=1), make(backend, device_pages=9, page_bytes=16)
    x, y = pages(2, 1), pages(2, 2)
    refused, kept = small.stash([x]), large.stash([y])
    assert (small.overflow.item(), large.overflow.item()) == (1.0, 0.0)
    assert (small.stats().device.in_use, large.stats().device.in_use) == (0, 8)
    small.release(refused)
    small.reset()
    assert torch.equal(large.restore(kept)[0], y)
    assert large.memory.state[Counter.WANTED].item() == 8


# --- without triton ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_triton_the_package_imports_and_the_reference_runs():
    program = """
        import sys

        sys.modules["triton"] = None  # cannot be imported, nor found
        import torch
        import pagestash
        from pagestash.pages.pool import PagePool

        pool = PagePool("cpu", 64, 4, 4)
        assert pool.memory.backend == "torch"
        x = torch.randn(6, 16)
        tickets = pool.stash([x], rows=torch.tensor(5))
        assert torch.equal(pool.restore(tickets)[0][:5], x[:5])
        pool.release(tickets)
        assert pool.stats().device.in_use == 0
        try:
            PagePool("cpu", 64, 4, backend="triton")
        except ValueError as error:
            assert "triton is not installed" in str(error)
        else:
            raise AssertionError("a backend that is not there was accepted")
        assert sys.modules["triton"] is None
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip() == "done", done.stderr
