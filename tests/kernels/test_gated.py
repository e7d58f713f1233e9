"""The gated activation against float64 autograd, over garbage tails, through pages, interleaved or not."""

import pytest
import torch
from support import error, same
from support.activations import VARIANTS, plain, woven
from support.tiers import slow

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe import gated as S
from pagestash.kernels.moe.activation import ACTIVATIONS, Activation
from pagestash.kernels.pages.paged import Pages
from pagestash.pages.pool import PagePool

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]
CAPACITY, ROWS, EXPERTS = 37, 29, 5
OFFSETS = torch.tensor([4, 4, 20, 21, 29], dtype=torch.int32)
LIMITS = torch.tensor([each.limit for each in VARIANTS.values() if each.limit is not None])


def case(n, dtype, ordered, biased, scale=3.0, parts=2):
    """Inputs whose tail is NaN, and their row info."""
    h = (scale * torch.randn(CAPACITY, parts * n)).to(dtype)
    h[torch.isin(h.abs(), LIMITS)] += 0.0625  # there torch's own gradient depends on its version
    gradient = torch.randn(CAPACITY, n).to(dtype)
    h[ROWS:] = gradient[ROWS:] = torch.nan
    order = torch.randperm(CAPACITY + 8, dtype=torch.int32) if ordered else None
    weights = torch.rand(CAPACITY + 8)
    bias = torch.randn(EXPERTS, parts * n).to(dtype) if biased else None
    info = S.RowInfo(torch.tensor([ROWS], dtype=torch.int32), weights, order, bias, OFFSETS)
    return h, gradient, info


def truth(h, gradient, info, activation):
    exact_h = h[:ROWS].double()
    at = torch.arange(ROWS) if info.order is None else info.order[:ROWS].long()
    if info.bias is not None:
        exact_h = exact_h + info.bias[torch.searchsorted(OFFSETS, torch.arange(ROWS), right=True)].double()
    exact_h.requires_grad_()
    weights = info.weights.double().requires_grad_()
    a = plain(exact_h, activation) * weights[at][:, None]
    dh, dweights = torch.autograd.grad(a, [exact_h, weights], gradient[:ROWS].double())
    return a.detach(), dh, dweights


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", VARIANTS)
@pytest.mark.parametrize(("n", "dtype", "ordered", "biased"), [
    (64, torch.bfloat16, True, False),
    (24, torch.float32, False, True),
    (130, torch.float32, True, True),
])  # fmt: skip
def test_values_and_gradients_are_those_of_float64(backend, activation, n, dtype, ordered, biased):
    activation = VARIANTS[activation]
    h, gradient, info = case(n, dtype, ordered, biased, parts=activation.parts)
    a_true, dh_true, dw_true = truth(h, gradient, info, activation)
    # bf16 rounds to 2**-9; the interpreter cuts off, twice that.
    most = 4e-3 if dtype == torch.bfloat16 else 1e-6
    a = S.forward(h, info, activation, backend=backend)
    assert error(a[:ROWS], a_true) < most
    dh, again, dweights = S.backward(h, gradient, info, activation, backend=backend)
    assert error(dh[:ROWS], dh_true) < most
    assert torch.equal(again[:ROWS], a[:ROWS])
    assert error(dweights, dw_true) < 1e-6
    assert h[:ROWS].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_the_limit_itself_a_gradient_passes_and_beyond_it_none(backend):
    activation = Activation(limit=3.0, shift=1.0)
    h = torch.tensor([[3.0, 1.0, 1.0, 3.0, -3.0, 3.5], [3.5, 1.0, 1.0, 1.0, 1.0, -3.5]])
    info = S.RowInfo(torch.tensor([2], dtype=torch.int32))
    dh, _, _ = S.backward(h, torch.ones(2, 3), info, activation, backend=backend)
    assert (dh != 0).tolist() == [
        [True, True, True, True, True, False],
        [False, True, True, True, True, False],
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_in_place_is_the_same(backend):
    h, gradient, info = case(96, torch.bfloat16, True, False)
    dh, a, dweights = S.backward(h, gradient, info, backend=backend)
    results = S.backward(h, gradient, info, in_place=True, backend=backend)
    assert results[0] is h
    assert results[1] is gradient
    assert torch.equal(h[:ROWS], dh[:ROWS])
    assert torch.equal(gradient[:ROWS], a[:ROWS])
    assert torch.equal(results[2], dweights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_weights_there_is_no_gradient_for_them(backend):
    h, gradient, info = case(32, torch.float32, False, False)
    bare = S.RowInfo(info.rows)
    ones = S.RowInfo(info.rows, torch.ones(CAPACITY))
    assert S.backward(h, gradient, bare, backend=backend)[2] is None
    assert torch.equal(S.forward(h, bare, backend=backend)[:ROWS], S.forward(h, ones, backend=backend)[:ROWS])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 1, CAPACITY])
def test_no_row_one_row_all_rows(backend, rows):
    h = torch.randn(CAPACITY, 32)
    h[rows:] = torch.nan
    info = S.RowInfo(torch.tensor([rows]), torch.rand(CAPACITY))
    a = S.forward(h, info, backend=backend)
    wanted = plain(h, ACTIVATIONS["silu"]) * info.weights[:, None]
    torch.testing.assert_close(a[:rows], wanted[:rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("page_bytes", "host_pages"), [(48, 40), (256, 3), *slow((16, 0), (1 << 16, 0), (1 << 16, 2))]
)
@pytest.mark.parametrize(
    ("n", "dtype", "activation"),
    [
        (40, torch.bfloat16, "silu"),
        (64, torch.float32, "silu"),
        (33, torch.float32, "silu"),
        (72, torch.bfloat16, "relu2, no gate"),
    ],
)
def test_pages_are_written_in_forward_and_read_in_backward(
    backend, page_bytes, host_pages, n, dtype, activation
):
    activation = VARIANTS[activation]
    h, gradient, info = case(n, dtype, True, False, parts=activation.parts)
    needed = -(-ROWS * h.shape[1] * h.element_size() // page_bytes)
    pool = PagePool("cpu", page_bytes, max(needed - host_pages, 0), host_pages, backend="torch")
    [ticket] = pool.stash([torch.zeros_like(h)], rows=info.rows)
    pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    assert bool(pages.granted)
    a = S.forward(h, info, activation, pages, backend=backend)
    assert torch.equal(a[:ROWS], S.forward(h, info, activation, backend=backend)[:ROWS])
    assert torch.equal(pool.restore([ticket])[0][:ROWS], h[:ROWS])
    wanted = S.backward(h, gradient, info, activation, backend=backend)
    garbage = torch.full_like(h, torch.nan)
    got = S.backward(garbage, gradient.clone(), info, activation, pages, in_place=True, backend=backend)
    for one, two in zip(got[:2], wanted[:2]):
        assert torch.equal(one[:ROWS], two[:ROWS])
    if page_bytes >= 1024:
        assert torch.equal(got[2], wanted[2])
    else:  # a tile is no wider than a page, and the order of a sum follows the tile
        torch.testing.assert_close(got[2], wanted[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_pages_granted_backward_reads_the_buffer(backend):
    h, gradient, info = case(64, torch.float32, True, False)
    pool = PagePool("cpu", 256, 2, backend="torch")
    [ticket] = pool.stash([h], rows=info.rows)
    pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    assert not bool(pages.granted)
    before = pool.memory.device_slab.clone()
    S.forward(h, info, pages=pages, backend=backend)
    assert torch.equal(pool.memory.device_slab, before)
    got = S.backward(h, gradient, info, pages=pages, backend=backend)
    wanted = S.backward(h, gradient, info, backend=backend)
    assert torch.equal(got[0][:ROWS], wanted[0][:ROWS])


def test_bad_input_is_named():
    info = S.RowInfo(torch.tensor([1]))
    with pytest.raises(ValueError, match="activation='relu'"):
        S.forward(torch.zeros(2, 4), info, "relu")
    with pytest.raises(ValueError, match=r"\[rows, 2n\]"):
        S.forward(torch.zeros(2, 5), info)
    with pytest.raises(ValueError, match="curve='mish'"):
        Activation(curve="mish")
    with pytest.raises(ValueError, match="only the curve 'sigmoid'"):
        Activation(curve="erf", slope=2.0)
    with pytest.raises(ValueError, match="limit=-1"):
        Activation(limit=-1.0)
    with pytest.raises(ValueError, match="gated=False"):
        Activation(limit=1.0, gated=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", VARIANTS)
def test_a_nan_is_not_hidden(backend, activation):
    activation = VARIANTS[activation]
    h = torch.ones(1, 4 * activation.parts)
    h[0, 1] = h[0, -2] = torch.nan
    a = S.forward(h, S.RowInfo(torch.tensor([1])), activation, backend=backend)
    assert same(a.isnan(), plain(h, activation).isnan())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [0, 1, 8, 17, ROWS, 33, CAPACITY])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_in_two_buffers_are_those_of_one(backend, split, paged):
    n = 24
    h, gradient, info = case(n, torch.float32, True, True)
    a = S.forward(h, info, backend=backend)
    dh, again, dweights = S.backward(h, gradient, info, backend=backend)
    expected, excess, pages = h[:split].clone(), h[split:].clone(), None
    if paged and split < CAPACITY:
        pool = PagePool("cpu", 1024, 8, backend=backend)
        ticket = pool.reserve(excess.shape, h.dtype, (info.rows - split).clamp(min=0))
        pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    got = S.forward(excess, info, pages=pages, expected_SH=expected, backend=backend)
    assert torch.equal(got[:ROWS], a[:ROWS])
    if pages is not None:
        assert torch.equal(pool.restore([ticket])[0][: max(ROWS - split, 0)], h[split:ROWS])
        excess.fill_(torch.nan)
    before = [expected.clone(), excess.clone()]
    for in_place in (False, True):
        target = expected if in_place else torch.full_like(expected, torch.nan)
        dexcess, got, got_weights = S.backward(
            excess,
            gradient.clone(),
            info,
            pages=pages,
            expected_SH=expected,
            dexpected_SH=target,
            in_place=in_place,
            backend=backend,
        )
        assert (dexcess is excess) == in_place
        assert torch.equal(torch.cat([target, dexcess])[:ROWS], dh[:ROWS])
        assert torch.equal(got[:ROWS], again[:ROWS])
        assert torch.equal(got_weights, dweights)
        if not in_place:
            for one, two in zip((expected, excess), before):
                assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    assert torch.cat([expected, dexcess])[ROWS:].isnan().all()


def test_expected_rows_need_a_buffer_for_their_gradient():
    h, gradient, info = case(8, torch.float32, False, False)
    with pytest.raises(ValueError, match="give both or neither"):
        S.backward(h, gradient, info, expected_SH=h[:2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_bytes", [None, 48, *slow(16, 1 << 16)])
@pytest.mark.parametrize(
    ("n", "dtype", "activation"),
    [
        (40, torch.bfloat16, "clamp, slope, one more"),
        *slow((33, torch.float32, "exact gelu"), (300, torch.float32, "clamped")),
    ],
)
def test_interleaved_rows_are_those_of_two_halves(backend, page_bytes, n, dtype, activation):
    activation = VARIANTS[activation]
    if n == 300 and page_bytes in (16, 48):
        n = 44  # a tile is no wider than a page: many tiles a row, without the hundreds that take seconds
    h, gradient, info = case(n, dtype, True, True)
    inter = S.RowInfo(info.rows, info.weights, info.order, woven(info.bias), OFFSETS, interleaved=True)
    pages = None
    if page_bytes is not None:
        pool = PagePool("cpu", page_bytes, -(-ROWS * 2 * n * h.element_size() // page_bytes), backend="torch")
        [ticket] = pool.stash([torch.zeros_like(h)], rows=info.rows)
        pages = Pages(pool.memory, ticket.span, ticket.member, ticket.group.book)
    a = S.forward(h, info, activation, backend=backend)
    got = S.forward(woven(h), inter, activation, pages, backend=backend)
    assert torch.equal(got[:ROWS], a[:ROWS])
    held = woven(h)
    if pages is not None:
        assert torch.equal(pool.restore([ticket])[0][:ROWS], held[:ROWS])
        held = torch.full_like(h, torch.nan)
    dh, a, dweights = S.backward(h, gradient, info, activation, backend=backend)
    for in_place in (False, True):
        rows, of_a = held.clone(), gradient.clone()
        got = S.backward(rows, of_a, inter, activation, pages, in_place=in_place, backend=backend)
        assert torch.equal(got[0][:ROWS], woven(dh)[:ROWS])
        assert torch.equal(got[1][:ROWS], a[:ROWS])
        torch.testing.assert_close(got[2], dweights, rtol=1e-5, atol=1e-5)
