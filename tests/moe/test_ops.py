"""The loss as an operator: `torch.library.opcheck`, gradients against autograd, backward twice."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from pagestash.moe import ops

T, D = 11, 16


def test_operators_pass_opcheck():
    hidden, head = torch.randn(T, D, requires_grad=True), torch.randn(7, D, requires_grad=True)
    labels = torch.randint(0, 7, (T,))
    opcheck(ops._linear_cross_entropy, (hidden, head, labels, -100, 0.1, 1e-3, 0.5, 3.0, True, 4, True, True))
    opcheck(ops._scaled, (hidden.detach(), torch.tensor(0.5), torch.bfloat16))


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
