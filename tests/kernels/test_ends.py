"""Where experts' rows end in a part of the rows."""

import pytest
import torch

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe.ends import cut_bounds, missing_bounds
from pagestash.kernels.pages.paged import Pages
from pagestash.pages.pool import PagePool

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]
ENDS = torch.tensor([0, 3, 3, 10, 12], dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("expected", "first", "excess"),
    [
        (0, [0, 0, 0, 0, 0], [0, 3, 3, 10, 12]),
        (5, [0, 3, 3, 5, 5], [0, 0, 0, 5, 7]),
        (12, [0, 3, 3, 10, 12], [0, 0, 0, 0, 0]),
        (99, [0, 3, 3, 10, 12], [0, 0, 0, 0, 0]),
    ],
)
def test_ends_are_cut_in_two(backend, expected, first, excess):
    got = cut_bounds(ENDS, expected, backend=backend)
    assert [ends.tolist() for ends in got] == [first, excess]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_number_of_all_rows_is_logged_in_a_ring(backend):
    log = torch.zeros(1 + 4, dtype=torch.int32)
    for call in range(6):
        ends = torch.tensor([0, call, 10 * call, 10 * call], dtype=torch.int32)
        got = cut_bounds(ends, 5, log=log, backend=backend)
        assert [part.tolist() for part in got] == [
            part.tolist() for part in cut_bounds(ends, 5, backend=backend)
        ]
    assert log.tolist() == [6, 40, 50, 20, 30]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("pages", "wanted"), [(12, [0, 0, 0, 0, 0]), (11, [0, 3, 3, 10, 12])])
def test_no_row_is_missing_where_pages_were_granted(backend, pages, wanted):
    pool = PagePool("cpu", 16, pages, backend=backend)
    ticket = pool.reserve((20, 4), torch.float32, ENDS[-1:], expendable=True)
    held = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    assert missing_bounds(ENDS, held, backend=backend).tolist() == wanted
