"""What the host knows of the free pages without asking: never more than there are, exact once it has looked."""

import random

import pytest
import torch

from pagestash.pages.pool import PagePool

PAGE = 256


def rows(count):
    return torch.tensor(count)


def test_groups_of_known_size_are_counted_exactly():
    pool = PagePool("cpu", PAGE, 10, 4, backend="torch")
    tickets = pool.stash([torch.zeros(100), torch.zeros(3, 64)], rows=[None, 2])
    assert pool.room.free == pool.room.count() == 14 - 2 - 2
    pool.release(tickets[:1])
    assert pool.room.free == pool.room.count() == 14 - 2
    pool.grow(device_pages=20)
    assert pool.room.free == pool.room.count() == 24 - 2


def test_rows_that_the_device_knows_count_as_all_of_them_until_they_are_asked_for():
    pool = PagePool("cpu", PAGE, 12, backend="torch")
    room = pool.room
    pool.stash([torch.zeros(8, 64)], rows=rows(2))
    assert (room.free, room.count()) == (4, 10)
    assert room.covers(4)
    assert not room.covers(5)  # from here on they are read back
    (second,) = pool.stash([torch.zeros(3, 64)], rows=rows(1))
    assert (room.free, room.count()) == (3, 9)
    pool.release([second])
    assert (room.free, room.count()) == (4, 10)


def test_what_may_not_fit_leaves_a_doubt_and_what_is_expendable_does_not():
    pool = PagePool("cpu", PAGE, 4, backend="torch")
    pool.reserve((8, 64), torch.float32, rows(3), expendable=True)
    assert not pool.room.unsure
    pool.reserve((8, 64), torch.float32, rows(1))
    assert pool.room.unsure
    assert not pool.overflow


def test_nothing_is_denied_where_the_step_does_not_keep():
    pool = PagePool("cpu", PAGE, 4, backend="torch")
    assert not pool.room.denies(100 * PAGE)
    pool.room.decides = True
    assert pool.room.denies(100 * PAGE)
    assert not pool.room.denies(100 * PAGE, rows(4), 100)
    assert pool.room.denies(100 * PAGE, rows(5), 100)
    assert pool.room.denies(100 * PAGE, rows(500), 100)
    assert not pool.room.denies(100 * PAGE, rows(-1), 100)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_never_promises_a_page_that_is_not_there(seed):
    draw = random.Random(seed)
    pool = PagePool("cpu", PAGE, draw.randint(1, 40), draw.randint(0, 10), backend="torch")
    room, live = pool.room, []
    for _ in range(60):
        what = draw.choice(["stash", "stash", "reserve", "expendable", "release", "ask", "grow"])
        capacity = draw.randint(1, 12)
        count = draw.choice([None, draw.randint(0, capacity), rows(draw.randint(-1, capacity + 2))])
        if what == "stash":
            tensors = [torch.zeros(capacity, draw.randint(1, 100)) for _ in range(draw.randint(1, 3))]
            certain = room.free >= sum(room.pages(tensor.nbytes) for tensor in tensors)
            refused = pool.stats().refused_groups
            live += pool.stash(tensors, rows=count)
            assert not certain or pool.stats().refused_groups == refused
        elif what in ("reserve", "expendable"):
            valid = rows(draw.randint(0, capacity))
            live.append(pool.reserve((capacity, 40), torch.float32, valid, expendable=what == "expendable"))
        elif what == "release" and live:
            pool.release([live.pop(draw.randrange(len(live))) for _ in range(draw.randint(1, len(live)))])
        elif what == "ask":
            room.covers(draw.randint(1, 30))
        elif what == "grow":
            pool.grow(device_pages=pool.device_pages + draw.randint(0, 3))
        assert room.free <= room.count()
    pool.release(live)
    assert room.free == room.count() == pool.device_pages + pool.host_pages
