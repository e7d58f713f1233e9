"""Expendable groups: they leave room for what cannot be made again, and their loss is no overflow."""

import pytest
import torch
from reference_ring import ReferenceRing

from pagestash.kernels.pages.copy import copy_to_pages
from pagestash.kernels.pages.layout import Counter, Header, Status
from pagestash.pages.pool import PagePool

PAGE = 64


def rows(count: int) -> torch.Tensor:
    return torch.tensor([count])


def write(pool, ticket, values):
    """What a kernel does that writes pages by itself."""
    at = pool.pages_of(ticket)
    copy_to_pages(at.memory, [values.view(-1)], [at.span], [at.member], at.book)


def status(ticket) -> int:
    return int(ticket.group.book[Header.STATUS])


def test_an_expendable_group_takes_pages_when_there_are_enough(backend):
    pool = PagePool("cpu", PAGE, 10, backend=backend)
    ticket = pool.reserve((16, PAGE), torch.uint8, rows(6), expendable=True)
    assert status(ticket) == Status.GRANTED
    values = torch.randint(0, 255, (16, PAGE), dtype=torch.uint8)
    write(pool, ticket, values)
    assert torch.equal(pool.restore([ticket])[0][:6], values[:6])
    pool.release([ticket])
    assert pool.stats().device.in_use == 0


def test_an_expendable_group_that_does_not_fit_is_no_overflow(backend):
    pool = PagePool("cpu", PAGE, 4, backend=backend)
    ticket = pool.reserve((16, PAGE), torch.uint8, rows(6), expendable=True)
    stats = pool.stats()
    assert status(ticket) == Status.REFUSED
    assert (stats.overflow, stats.refused_groups, stats.given_up_groups) == (False, 0, 1)
    assert (stats.device.in_use, stats.device.wanted, stats.required) == (0, 6, 0)
    pool.release([ticket])
    assert pool.memory.state[Counter.WANTED] == 0


def test_an_expendable_group_never_goes_to_host_pages(backend):
    pool = PagePool("cpu", PAGE, 4, 100, backend=backend)
    ticket = pool.reserve((16, PAGE), torch.uint8, rows(6), expendable=True)
    assert status(ticket) == Status.REFUSED
    assert pool.stats().host.in_use == 0


def test_the_first_run_teaches_expendable_groups_what_to_leave_free(backend):
    """Each of four layers keeps 2 pages it needs and 3 it can make again, in a pool of 8: all it needs."""
    pool = PagePool("cpu", PAGE, 8, backend=backend)

    def forward():
        held, granted = [], []
        for _ in range(4):
            held.append(pool.reserve((8, PAGE), torch.uint8, rows(2)))
            held.append(pool.reserve((8, PAGE), torch.uint8, rows(3), expendable=True))
            granted.append(status(held[-1]) == Status.GRANTED)
        for ticket in reversed(held):
            pool.release([ticket])
        return granted

    assert forward() == [True, False, False, False]
    assert pool.stats().overflow  # the first expendable group took what the last layer needed
    pool.reset()
    assert forward() == [False] * 4
    stats = pool.stats()
    assert not stats.overflow
    assert stats.required == 8
    pool.grow(device_pages=14)
    assert forward() == [True, True, False, False]
    assert not pool.stats().overflow


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ring_and_kernels_agree_on_expendable_groups(backend, seed):
    generator = torch.Generator().manual_seed(seed)
    pool = PagePool("cpu", PAGE, 24, 8, backend=backend)
    ring = ReferenceRing(PAGE, 24, 8)
    live = []
    for _ in range(40):
        choice = int(torch.randint(0, 3, (), generator=generator))
        if choice < 2:
            count, expendable = int(torch.randint(0, 12, (), generator=generator)), choice == 1
            ticket = pool.reserve((12, PAGE), torch.uint8, rows(count), expendable=expendable)
            (twin,) = ring.reserve([count * PAGE], expendable)
            assert (status(ticket) == Status.GRANTED) == twin.granted
            live.append((ticket, twin))
        elif live:
            ticket, twin = live.pop(int(torch.randint(0, len(live), (), generator=generator)))
            pool.release([ticket])
            ring.release([twin])
        state = pool.memory.state
        assert int(state[Counter.REQUIRED]) == ring.required
        stats = pool.stats()
        assert (stats.device.in_use, stats.host.in_use) == (ring.in_use("device"), ring.in_use("host"))
        assert (stats.required, stats.given_up_groups) == (ring.required_peak, ring.given_up)
        assert (stats.overflow, stats.device.wanted) == (ring.overflow, ring.wanted_peak)


def test_a_ticket_may_be_released_later(backend):
    pool = PagePool("cpu", PAGE, 10, backend=backend)
    (ticket,) = pool.stash([torch.zeros(3, PAGE, dtype=torch.uint8)])
    pool.release_later(ticket)
    assert not ticket.released
    pool.stash([torch.zeros(10, PAGE, dtype=torch.uint8)])  # fits: the pages were given back first
    assert ticket.released
    assert not pool.stats().overflow


def test_reserve_checks_its_arguments():
    pool = PagePool("cpu", PAGE, 10, backend="torch")
    with pytest.raises(ValueError, match="one int32 or int64 element"):
        pool.reserve((4, PAGE), torch.uint8, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("pages", [10, 6])
def test_a_restore_can_depend_on_whether_other_pages_are_missing(backend, pages):
    pool = PagePool("cpu", PAGE, pages, backend=backend)
    kept = pool.reserve((16, PAGE), torch.uint8, rows(5))
    values = torch.randint(0, 255, (16, PAGE), dtype=torch.uint8)
    write(pool, kept, values)
    other = pool.reserve((16, PAGE), torch.uint8, rows(3), expendable=True)
    buffer = torch.full((16, PAGE), 7, dtype=torch.uint8)
    pool.restore_into([kept], [buffer], None, unless=other.group.book[Header.STATUS])
    missing = status(other) == Status.REFUSED
    assert missing == (pages == 6)
    assert torch.equal(buffer[:5], values[:5] if missing else torch.full((5, PAGE), 7, dtype=torch.uint8))
    assert (buffer[5:] == 7).all()
