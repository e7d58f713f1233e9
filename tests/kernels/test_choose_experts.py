"""The router's kernels against torch's operations, and float64 autograd."""

import pytest
import torch
from support.compare import error, same
from support.tiers import slow

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe.choose_experts import (
    Scoring,
    choose_experts,
    weigh,
    weigh_gradient,
    weigh_reference,
)

pytestmark = pytest.mark.skipif(not interpreted(), reason="interpreter")
SCORINGS = [
    Scoring(sigmoid, normalise, scale)
    for sigmoid in (False, True)
    for normalise in (False, True)
    for scale in (1.0, 2.5)
]
SHAPES = [(1, 1, 1), (5, 3, 3), (33, 7, 2), (20, 128, 8), (3, 130, 6), (0, 8, 2)]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
@pytest.mark.parametrize("corrected", [True, *slow(False)])
def test_choices_and_weights_are_those_of_torch(scoring, tokens, experts, top_k, corrected):
    torch.manual_seed(0)
    logits = torch.randint(-4, 5, (tokens, experts)).float() / 2  # many ties
    correction = torch.randn(experts) if corrected else None
    ids, weights = choose_experts(logits, top_k, scoring, correction, backend="triton")
    wanted, wanted_weights = choose_experts(logits, top_k, scoring, correction, backend="torch")
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, wanted_weights)
    # What a replay weighs again has the bits of the choice.
    assert same(weigh(logits, ids, scoring, backend="triton"), weights)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES[:-1])
def test_gradients_are_those_of_float64(scoring, tokens, experts, top_k):
    torch.manual_seed(0)
    logits = 3 * torch.randn(tokens, experts)
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].int()
    dweights = torch.randn(tokens, top_k)
    wide = logits.double().requires_grad_()
    weigh_reference(wide, ids, scoring).backward(dweights.double())
    for backend in ("torch", "triton"):
        got = weigh_gradient(logits, ids, dweights, scoring, torch.float32, backend=backend)
        assert (got - wide.grad).norm() <= 1e-5 * wide.grad.norm() + 1e-6
    if wide.grad.any():
        narrow = weigh_gradient(logits, ids, dweights, scoring, torch.float16, backend="triton")
        assert narrow.dtype == torch.float16
        assert error(narrow, wide.grad) < 2e-3


def test_ids_stay_distinct_and_in_range_whatever_the_logits():
    logits = torch.full((4, 6), -torch.inf)
    logits[1] = torch.nan
    logits[2] = torch.inf
    logits[3, 4] = 1.0
    ids, _ = choose_experts(logits, 5, Scoring(), backend="triton")
    assert ids[0].tolist() == ids[1].tolist() == ids[2].tolist() == [0, 1, 2, 3, 4]
    assert ids[3].tolist() == [4, 0, 1, 2, 3]


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match="k=4: expected 1 to 3"):
        choose_experts(torch.zeros(2, 3), 4, Scoring())
