"""What cannot be is refused by name and value, and changes nothing."""

import math

import pytest
import torch
from small_pool import assert_unchanged, make, snapshot

from pagestash.kernels.pages.layout import HOST_BASE
from pagestash.pages.pool import PagePool


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
    ([ONE, ONE], [torch.tensor(1), torch.tensor(1)], "rows: at most one device tensor"),
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
