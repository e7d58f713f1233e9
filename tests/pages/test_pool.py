"""What a page pool promises, one promise a test."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from three_way import POISON, as_bytes

from pagestash.kernels.pages import release as release_kernels
from pagestash.kernels.pages.layout import HOST_BASE, Counter
from pagestash.pages.host import host_slab
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
    assert all(torch.equal(now, then) for now, then in zip(tensors, before[2], strict=True))


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


# --- overflow ---------------------------------------------------------------------------------------------------


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
    assert all(torch.equal(now, then) for now, then in zip(kept, moments))
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
    assert all(torch.equal(ticket.group.book, book) for ticket, book in zip(tickets, books))
    back = pool.restore(tickets)
    assert torch.equal(back[0], x)
    assert torch.equal(back[1], y)
    z = pages(7, 3)
    more = pool.stash([z])
    assert not pool.stats().overflow
    assert (pool.stats().device.in_use, pool.stats().host.in_use) == (5, 7)
    assert all(torch.equal(*pair) for pair in zip(pool.restore(tickets + more), (x, y, z)))


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


# --- misuse -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_bytes": 24, "device_pages": 1}, "page_bytes=24: expected a positive multiple of 16"),
        ({"page_bytes": 0, "device_pages": 1}, "page_bytes=0"),
        ({"page_bytes": -16, "device_pages": 1}, "page_bytes=-16"),
        ({"device_pages": 0}, "device_pages=0 and host_pages=0"),
        ({"device_pages": -1}, "device_pages=-1"),
        ({"device_pages": 1, "host_pages": -2}, "host_pages=-2"),
        ({"device_bytes": -5}, "device_bytes=-5: expected 0 or more"),
        ({"device_pages": 1, "device_bytes": 64}, "device_pages=1 and device_bytes=64"),
        ({"device_pages": 1, "host_pages": 1, "host_bytes": 64}, "host_pages=1 and host_bytes=64"),
        ({}, "device_pages or device_bytes"),
        ({"device_pages": HOST_BASE}, f"device_pages={HOST_BASE}"),
        ({"device_pages": 1, "backend": "cuda"}, "backend='cuda'"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_name_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        PagePool("cpu", **arguments)


def test_sizes_may_be_given_in_bytes():
    pool = PagePool("cpu", 64, device_bytes=65, host_bytes=64)
    assert (pool.device_pages, pool.host_pages) == (2, 1)


ONE = torch.ones(4, 3)
MISUSED_STASHES = [
    ([torch.ones(2, device="meta")], None, r"tensors\[0\] is on meta, the pool on cpu"),
    (
        [ONE, torch.ones(4, 6)[:, ::2]],
        None,
        r"tensors\[1\] of shape \(4, 3\) and strides \(6, 2\) is not contiguous",
    ),
    ([torch.ones(3, 4).t()], None, "not contiguous"),
    ([torch.ones(3).to_sparse()], None, "not contiguous"),
    ([torch.ones(3, dtype=torch.complex64).conj()], None, r"tensors\[0\] is a lazy conjugate"),
    ([ONE], -1, r"rows=-1: tensors\[0\] has 4 rows"),
    ([ONE], 5, r"rows=5: tensors\[0\] has 4 rows"),
    ([ONE, ONE[:2]], 3, r"rows=3: tensors\[1\] has 2 rows"),
    ([torch.tensor(1.0)], 2, r"rows=2: tensors\[0\] has 1 rows"),
    ([ONE], 2.5, r"rows=2.5: expected None, an int"),
    ([ONE], torch.ones(1), r"rows has shape \(1,\) and dtype torch.float32"),
    ([ONE], torch.ones(2, dtype=torch.int64), r"rows has shape \(2,\)"),
    ([ONE], torch.ones((), dtype=torch.int64, device="meta"), "rows is on meta, the pool on cpu"),
    ([ONE], [1, 2], "rows: 2 values for 1 tensors"),
    ([ONE, ONE], [torch.tensor(1), torch.tensor(1)], "rows: at most one device integer"),
    (ONE, None, "tensors: expected a sequence of tensors, got one tensor"),
]


@pytest.mark.parametrize(("tensors", "rows", "message"), MISUSED_STASHES)
def test_a_stash_that_cannot_be_is_refused_by_name_and_value(tensors, rows, message):
    pool = make("torch")
    pool.stash([ONE])
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        pool.stash(tensors, rows)
    assert_unchanged(pool, before)


@pytest.mark.parametrize("account", [-1, 4096])
def test_an_account_out_of_range_is_refused(account):
    pool = make("torch")
    with pytest.raises(ValueError, match=f"account={account}"):
        pool.stash([ONE], account=account)
    assert pool.live_tickets == 0


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([], "buffers: 0 tensors for 1 tickets"),
        ([torch.zeros(4, 3, device="meta")], r"buffers\[0\] is on meta, the pool on cpu"),
        ([torch.zeros(3, 4).t()], r"buffers\[0\] of shape \(4, 3\) and strides \(1, 4\) is not contiguous"),
        ([torch.zeros(3, 3)], r"buffers\[0\] has 36 bytes, the ticket's tensor 48"),
    ],
)
def test_a_buffer_that_cannot_be_restored_into_is_refused(buffers, message):
    pool = make("torch", device_pages=1, host_pages=1)
    tickets = pool.stash([ONE])
    with pytest.raises(ValueError, match=message):
        pool.restore_into(tickets, buffers)
    with pytest.raises(ValueError, match=message.replace("buffers", "tensors")):
        pool.spill(tickets, buffers)


def test_a_fill_that_the_dtype_cannot_hold_is_refused():
    pool = make("torch")
    tickets = pool.stash([torch.arange(3)], rows=1)
    with pytest.raises(ValueError, match=r"fill=nan: no value of torch.int64"):
        pool.restore(tickets, fill=math.nan)
    with pytest.raises(ValueError, match=r"fill=1.0: only 0 or None for torch.complex128"):
        pool.restore(pool.stash([torch.ones(3, dtype=torch.complex128)]), fill=1.0)


def test_tickets_of_another_pool_are_refused():
    mine, other = make("torch"), make("torch")
    own, foreign = mine.stash([ONE]), other.stash([ONE])
    before = snapshot(mine), snapshot(other)
    for use in (mine.restore, mine.release, mine.buffers):
        with pytest.raises(ValueError, match=r"tickets\[1\] belongs to another pool"):
            use(own + foreign)
    with pytest.raises(ValueError, match="expected a sequence of tickets, got one"):
        mine.release(own[0])
    assert_unchanged(mine, before[0])
    assert_unchanged(other, before[1])


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


def test_without_triton_the_package_imports_and_the_reference_runs():
    program = """
        import sys

        class NoTriton:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, NoTriton())
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
        assert "triton" not in sys.modules
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "done", done.stderr
