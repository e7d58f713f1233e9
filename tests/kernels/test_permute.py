"""Rows into expert order and back: exact where bytes move, a fixed order where they are summed."""

import pytest
import torch

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe import combine as C
from pagestash.kernels.moe import permute as P
from pagestash.kernels.moe.route import route
from pagestash.kernels.pages.layout import HEADER, Header
from pagestash.kernels.pages.paged import Pages
from pagestash.pages.pool import PagePool

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]
SHAPES = [(5, 2, 16), (33, 3, 40), (9, 4, 256), (6, 2, 1100)]


def rounded(wide, dtype, backend):
    """As the backend rounds: the interpreter cuts a float32 off where a GPU rounds it to nearest."""
    if backend == "triton" and dtype == torch.bfloat16:
        wide = (wide.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return wide.to(dtype)


def routing(tokens, choices, experts=7, capacity=None):
    ids = torch.rand(tokens, experts).argsort(1)[:, :choices].to(torch.int32)
    return ids, route(ids, experts, capacity=capacity, backend="torch")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "choices", "width"), SHAPES)
def test_permute_moves_every_row_and_touches_no_other(backend, dtype, tokens, choices, width, monkeypatch):
    _, found = routing(tokens, choices, capacity=tokens * choices - 3)
    x = torch.randn(tokens, width).to(dtype)
    monkeypatch.setattr(
        P, "empty_rows", lambda r, w, like: torch.full((r + 5, w), torch.nan, dtype=like.dtype)
    )
    out = P.permute(x, found.inverse, found.order.numel(), backend=backend)
    count = int(found.rows)
    assert torch.equal(out[:count], x[found.order[:count].long() // choices])
    assert out[count:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "choices", "width"), SHAPES)
def test_combine_sums_in_the_order_of_the_choices(backend, dtype, tokens, choices, width):
    _, found = routing(tokens, choices, capacity=tokens * choices - 3)
    rows = torch.randn(tokens * choices, width).to(dtype)
    rows[int(found.rows) :] = torch.nan
    wanted = torch.zeros(tokens, width)
    for k in range(choices):
        at = found.inverse[:, k]
        value = torch.where((at >= 0)[:, None], rows[at.clamp(min=0).long()].float(), torch.zeros(()))
        wanted = wanted + value
    got = C.combine(rows, found.inverse, backend=backend)
    assert torch.equal(got, rounded(wanted, dtype, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_tokens_without_a_place_are_not_read(backend):
    inverse = torch.tensor([[0, 1], [-1, -1], [2, -1]], dtype=torch.int32)
    x = torch.randn(3, 32)
    x[1] = torch.nan
    out = P.permute(x, inverse, 4, torch.ones(3, 2), backend=backend)
    assert torch.equal(out[:3], x[[0, 0, 2]])
    back = C.combine(out, inverse, torch.ones(3, 2), backend=backend)
    assert torch.equal(back[1], torch.zeros(32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_their_gradient(backend):
    ids, found = routing(20, 3, capacity=55)
    rows = torch.randn(60, 48)
    rows[int(found.rows) :] = torch.nan
    weights, bias = torch.rand(20, 3), torch.randn(7, 48)
    here = (found.inverse >= 0)[..., None]
    each = torch.where(here, rows[found.inverse.clamp(min=0).long()], torch.zeros(()))
    shift = torch.where(here, weights[..., None] * bias[ids.long()], torch.zeros(()))
    got = C.combine(
        rows,
        found.inverse,
        weights,
        bias_ED=bias,
        bias_ids_TK=ids,
        backend=backend,
    )
    torch.testing.assert_close(got, (each * weights[..., None] + shift).sum(1), rtol=1e-5, atol=1e-6)
    gradient = torch.randn(20, 48)
    got = C.weight_gradient(rows, found.inverse, gradient, backend=backend)
    torch.testing.assert_close(got, (each * gradient[:, None]).sum(-1), rtol=1e-5, atol=1e-5)
    got = P.permute(gradient, found.inverse, 55, weights, backend=backend)
    wanted = (gradient[:, None] * weights[..., None]).view(60, 48)[found.order.long()]
    assert torch.equal(got[: int(found.rows)], wanted[: int(found.rows)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_bytes", [16, 48, 1024])
@pytest.mark.parametrize("host_pages", [0, 9])
def test_permute_stashes_what_it_writes(backend, page_bytes, host_pages):
    _, found = routing(21, 2, capacity=40)
    x = torch.randn(21, 56).to(torch.bfloat16)
    pages_needed = -(-40 * 112 // page_bytes)
    pool = PagePool("cpu", page_bytes, pages_needed - host_pages // 2, host_pages, backend="torch")
    # A stash of anything of that shape takes the pages; permute then writes over what is in them.
    [ticket] = pool.stash([torch.zeros(40, 56, dtype=torch.bfloat16)], rows=found.rows)
    pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    _, out = P.permute_split(x, found.inverse, 0, 40, pages=pages, backend=backend)
    count = int(found.rows)
    [held] = pool.restore([ticket])
    assert torch.equal(held[:count], out[:count])
    ticket.group.book[HEADER * ticket.member + Header.STATUS] = 2  # refused: nothing may be written
    P.permute_split(torch.full_like(x, torch.nan), found.inverse, 0, 40, pages=pages, backend=backend)
    ticket.group.book[HEADER * ticket.member + Header.STATUS] = 1
    assert torch.equal(pool.restore([ticket])[0][:count], out[:count])


def test_allocation_is_padded_to_the_alignment():
    sizes = {P.empty_rows(r, 8, torch.empty(0)).untyped_storage().nbytes() for r in range(257, 513)}
    assert sizes == {512 * 32}
    assert P.empty_rows(300, 8, torch.empty(0)).shape == (300, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("expected", [0, 1, 13, 30, 36])
@pytest.mark.parametrize("page_bytes", [None, 64])
def test_rows_in_two_buffers_are_those_of_one(backend, expected, page_bytes, monkeypatch):
    _, found = routing(12, 3, capacity=30)
    x = torch.randn(12, 40)
    wanted = P.permute(x, found.inverse, 36, backend="torch")[:30]
    monkeypatch.setattr(P, "empty_rows", lambda r, w, like: torch.full((r, w), torch.nan, dtype=like.dtype))
    pages = None
    beyond = (found.offsets - expected).clamp(min=0)
    if page_bytes and expected < 36:
        pool = PagePool("cpu", page_bytes, 100, backend=backend)
        ticket = pool.reserve((36 - expected, 40), x.dtype, beyond[-1:])
        pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    first, excess = P.permute_split(x, found.inverse, expected, 36, pages=pages, backend=backend)
    assert (first is None) == (expected == 0)
    assert first is None or first.shape[0] == expected
    both = excess if first is None else torch.cat([first, excess])
    assert torch.equal(both[:30], wanted)
    assert both[30:].isnan().all()
    if pages is not None:
        assert torch.equal(pool.restore([ticket])[0][: max(30 - expected, 0)], wanted[expected:])
    one = C.combine(wanted, found.inverse, backend=backend)
    assert torch.equal(C.combine(excess, found.inverse, expected_SD=first, backend=backend), one)
