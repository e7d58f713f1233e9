"""The fused head against float64 autograd, chunk by chunk."""

import pytest
import torch
import torch.nn.functional as F
from support import error
from support.tiers import slow

from pagestash.kernels.backend import interpreted
from pagestash.kernels.loss.cross_entropy import LossOptions, linear_cross_entropy, softmax_loss_

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]


def truth(hidden, weight, labels, options):
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = options.logit_scale * (hidden @ weight.t())
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    loss = F.cross_entropy(
        logits,
        labels.long(),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="sum",
    )
    counted = labels != options.ignore_index
    loss = loss + options.z_loss * (torch.logsumexp(logits, 1)[counted] ** 2).sum()
    if options.mean:
        loss = loss / counted.sum().clamp(min=1)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("options", [
    LossOptions(chunk=7),
    LossOptions(chunk=8, label_smoothing=0.1, z_loss=1e-2, mean=False),
    LossOptions(ignore_index=3),
    LossOptions(logit_scale=0.25, chunk=8),
    LossOptions(logit_scale=3.0, soft_cap=2.0, z_loss=1e-2, label_smoothing=0.1),
])  # fmt: skip
@pytest.mark.parametrize("vocabulary", [50, *slow(5000)])
def test_loss_and_gradients_are_those_of_float64(backend, dtype, most, options, vocabulary):
    hidden, weight = torch.randn(20, 16).to(dtype), (torch.randn(vocabulary, 16) / 4).to(dtype)
    labels = torch.randint(0, vocabulary, (20,), dtype=torch.int64 if vocabulary == 50 else torch.int32)
    labels[[2, 11]] = options.ignore_index
    got = linear_cross_entropy(hidden, weight, labels, options, backend=backend)
    wanted = truth(hidden, weight, labels, options)
    for one, two in zip(got, wanted):
        assert error(one, two) < most
    assert got[2].dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_label_count_for_nothing(backend):
    hidden, weight = torch.randn(6, 8), torch.randn(11, 8)
    labels = torch.full((6,), -100)
    loss, dhidden, dweight = linear_cross_entropy(hidden, weight, labels, LossOptions(), backend=backend)
    assert loss == 0
    assert not dhidden.any()
    assert not dweight.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_garbage_in_the_rows_without_a_label_reaches_nothing(backend, dtype):
    hidden, weight = torch.randn(9, 8).to(dtype), torch.randn(11, 8).to(dtype)
    labels = torch.randint(0, 11, (9,))
    labels[[0, 1, 5]] = -100
    options = LossOptions(chunk=4, z_loss=1e-2)
    wanted = linear_cross_entropy(hidden, weight, labels, options, backend=backend)
    for garbage in (torch.nan, torch.inf):
        hidden[[0, 1, 5]] = garbage
        got = linear_cross_entropy(hidden, weight, labels, options, backend=backend)
        for one, two in zip(got, wanted):
            assert torch.equal(one, two)
    assert hidden[0].isinf().all()  # the caller's tensor is left as it is


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_out_of_range_does_not_pass_silently(backend):
    losses = torch.empty(2)
    logits = torch.randn(2, 9)
    softmax_loss_(logits, torch.tensor([9, 1]), losses, torch.ones(()), LossOptions(), backend=backend)
    assert losses[0].isnan()
    assert losses[1].isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_do_not_overflow(backend):
    logits = 1e4 * torch.randn(3, 70)
    logits[0, 5] = -torch.inf
    labels = torch.tensor([1, 2, 3])
    wanted = F.cross_entropy(logits.double(), labels, reduction="none")
    losses = torch.empty(3)
    softmax_loss_(logits, labels, losses, torch.ones(()), LossOptions(), backend=backend)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-3)
    assert logits.isfinite().all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="label_smoothing=2"):
        LossOptions(label_smoothing=2)
    with pytest.raises(ValueError, match="expected"):
        linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2).long(), LossOptions())
    with pytest.raises(ValueError, match="labels"):
        linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3).long(), LossOptions())
