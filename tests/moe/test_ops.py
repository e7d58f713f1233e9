"""The operators: `torch.library.opcheck`, gradients against autograd, garbage tails, backward twice."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from pagestash.moe import ops

T, K, E, D, N = 11, 2, 4, 16, 8


def routed():
    ids = torch.rand(T, E).argsort(1)[:, :K].to(torch.int32)
    return ids, *ops.route(ids, E)


def test_operators_pass_opcheck():
    ids, _, offsets, order, inverse = routed()
    x = torch.randn(T, D, requires_grad=True)
    rows = torch.randn(T * K, D, requires_grad=True)
    h = torch.randn(T * K, 2 * N, requires_grad=True)
    weights = torch.rand(T, K, requires_grad=True)
    hidden, head = torch.randn(T, D, requires_grad=True), torch.randn(7, D, requires_grad=True)
    labels = torch.randint(0, 7, (T,))
    for op, arguments in [
        (ops.route, (ids, E)),
        (ops.permute, (x, inverse, T * K)),
        (ops.combine, (rows, inverse)),
        (ops.combine, (rows, inverse, weights)),
        (ops.gated, (h, offsets[-1:], weights, order, "gelu")),
        (ops.gated, (h, offsets[-1:])),
        (ops._linear_cross_entropy, (hidden, head, labels, -100, 0.1, 1e-3, 0.5, 3.0, True, 4, True, True)),
        (ops._scaled, (hidden.detach(), torch.tensor(0.5), torch.bfloat16)),
    ]:
        opcheck(op, arguments)
    # The compiled check adds up all outputs, and one of these is bool.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.multihot, (ids, weights, E), test_utils=checks)


def test_permute_and_combine_are_each_others_gradient():
    _, _, _, order, inverse = routed()
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(T * K, D, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    got = ops.permute(x, inverse, T * K)
    assert torch.equal(got, x[order.long() // K])
    torch.autograd.gradcheck(lambda x: ops.permute(x, inverse, T * K), x)
    torch.autograd.gradcheck(lambda r: ops.combine(r, inverse), rows)
    wanted = torch.autograd.grad(
        (rows[inverse.long()] * weights[..., None]).sum(1).square().sum(), [rows, weights]
    )
    got = torch.autograd.grad(ops.combine(rows, inverse, weights).square().sum(), [rows, weights])
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-5)


def test_garbage_past_the_valid_rows_reaches_nothing():
    ids = torch.rand(T, E).argsort(1)[:, :K].to(torch.int32)
    _, offsets, order, inverse = ops.route(ids, E, 0, T * K + 9)
    x = torch.randn(T, D, requires_grad=True)
    w = torch.rand(T, K, requires_grad=True)

    class Poison(torch.autograd.Function):
        """NaN in every tail row, forward and backward."""

        @staticmethod
        def forward(ctx, rows):
            rows = rows.clone()
            rows[T * K :] = torch.nan
            return rows

        backward = forward

    h = Poison.apply(ops.permute(x, inverse, T * K + 9))
    a = Poison.apply(ops.gated(h, offsets[-1:], w, order))
    y = ops.combine(a, inverse)
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert w.grad.isfinite().all()
    gate, linear = x[order[: T * K].long() // K].chunk(2, dim=1)
    flat = F.silu(gate) * linear * w.view(-1)[order[: T * K].long(), None]
    wanted = torch.zeros(T, D // 2).index_add(0, order[: T * K].long() // K, flat)
    torch.testing.assert_close(y, wanted)
    for got, want in zip((x.grad, w.grad), torch.autograd.grad(wanted.square().sum(), [x, w])):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_a_product_over_the_whole_buffer_sees_zeros_where_no_choice_is():
    """Plain products, which know nothing of valid rows: their weights' gradients sum over the buffer."""
    torch.manual_seed(0)
    ids = torch.tensor([[0, -1], [3, 1], [-1, -1]], dtype=torch.int32)
    _, offsets, order, inverse = ops.route(ids, E, 0, 8)
    token = order[:3].long() // 2
    x, up, down, w = torch.randn(3, D), torch.randn(D, 2 * N) / 4, torch.randn(N, D) / 3, torch.rand(3, 2)

    def gradients(fused):
        leaves = [t.clone().requires_grad_() for t in (x, up, down, w)]
        a, b, c, d = leaves
        if fused:
            inner = ops.gated(ops.permute(a, inverse, 8) @ b, offsets[-1:], d, order)
            y = ops.combine(inner @ c, inverse)
        else:
            gate, linear = (a[token] @ b).chunk(2, dim=1)
            rows = (F.silu(gate) * linear * d.view(-1)[order[:3].long(), None]) @ c
            y = torch.zeros(3, D).index_add(0, token, rows)
        return torch.autograd.grad(y.square().sum(), leaves)

    for got, wanted in zip(gradients(True), gradients(False)):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_multihot_gradient_is_that_of_scatter():
    ids = torch.tensor([[0, 3], [2, -1], [1, 1]])
    weights = torch.randn(3, 2, requires_grad=True)
    _, dense = ops.multihot(ids, weights, E)
    dense.backward(torch.arange(12.0).view(3, 4))
    assert weights.grad.tolist() == [[0.0, 3.0], [6.0, 0.0], [9.0, 9.0]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_backward_scales_and_may_come_twice(reduction):
    hidden, weight = torch.randn(2, 9, D), torch.randn(23, D)
    labels = torch.randint(0, 23, (2, 9))
    labels[1, 3] = -100
    got, wanted = [], []
    for results, fused in ((got, True), (wanted, False)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            loss = ops.cross_entropy(h, w, labels, reduction=reduction, chunk=5)
        else:
            loss = F.cross_entropy((h @ w.t()).flatten(0, 1), labels.flatten(), reduction=reduction)
        (3 * loss).backward(retain_graph=True)
        (2 * loss).backward()
        results += [loss.detach(), h.grad, w.grad]
    for one, two in zip(got, wanted):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=1e-5)


def test_cross_entropy_computes_only_what_is_asked_for():
    hidden, weight = torch.randn(9, D, requires_grad=True), torch.randn(23, D)
    loss = ops.cross_entropy(hidden, weight, torch.randint(0, 23, (9,)))
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not ops.cross_entropy(hidden, weight, torch.randint(0, 23, (9,))).requires_grad
    with pytest.raises(ValueError, match="reduction='none'"):
        ops.cross_entropy(hidden, weight, torch.zeros(9).long(), reduction="none")


def test_a_loss_that_nothing_depends_on_has_no_gradients():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = ops.cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 4]))

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            return None

    Cut.apply(loss).backward()
    assert hidden.grad is None
    assert weight.grad is None
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    torch.autograd.gradcheck(lambda h, w: ops.cross_entropy(h, w, torch.tensor([0, 1, 2, 4])), wide)
