"""The choice of experts, its weights, and the bias that evens the load."""

import pytest
import torch

from pagestash.kernels.moe.choose_experts import topk
from pagestash.moe import MoEConfig, Router
from pagestash.moe import router as routing
from pagestash.moe.router import choose_experts


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (33, 7, 3), (20, 128, 8)])
def test_topk_is_a_stable_sort(backend, tokens, experts, k):
    scores = torch.randint(0, 5, (tokens, experts)).float()  # many ties
    wanted = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
    got = topk(scores, k, backend=backend)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), wanted)


def test_ids_stay_distinct_and_in_range_whatever_the_scores(backend):
    scores = torch.full((4, 6), -torch.inf)
    scores[1] = torch.nan
    scores[2] = torch.inf
    scores[3, 4] = 1.0
    ids = topk(scores, 5, backend=backend)
    assert ids[0].tolist() == ids[1].tolist() == ids[2].tolist() == [0, 1, 2, 3, 4]
    assert ids[3].tolist() == [4, 0, 1, 2, 3]


def test_groups_limit_where_experts_come_from():
    config = MoEConfig(width=8, expert_width=8, experts=12, top_k=3, groups=4, group_limit=2, score="sigmoid")
    logits, bias = torch.randn(50, 12), 0.1 * torch.randn(12)
    ids, _ = choose_experts(logits, bias, config)
    scores = torch.sigmoid(logits) + bias
    for t in range(50):
        groups = scores[t].view(4, 3)
        worth = groups.sort(dim=1, descending=True).values[:, :2].sum(1)
        allowed = set(worth.argsort(descending=True)[:2].tolist())
        candidates = [e for e in range(12) if e // 3 in allowed]
        best = sorted(candidates, key=lambda e: -float(scores[t, e]))[:3]
        assert ids[t].tolist() == best


def test_update_bias_lifts_idle_experts():
    config = MoEConfig(width=4, expert_width=8, experts=3, top_k=1, correction_bias=True)
    router = Router(config)
    router.weight.data = torch.tensor([[1.0, 0, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]])
    router(torch.ones(6, 4))
    assert router.load.tolist() == [6, 0, 0]
    router.update_bias(0.25)
    assert router.correction.tolist() == [-0.25, 0.25, 0.25]
    assert router.load.tolist() == [0, 0, 0]
    with torch.no_grad():
        router(torch.ones(6, 4))
    assert router.load.tolist() == [0, 0, 0]  # evaluation does not count


def test_a_router_without_the_bias_says_so():
    with pytest.raises(ValueError, match="correction_bias"):
        Router(MoEConfig(width=4, expert_width=8, experts=3, top_k=1)).update_bias()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="k=4"):
        topk(torch.zeros(2, 3), 4)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [False, True])
def test_gradients_without_autograd_are_autograds(score, normalise):
    config = MoEConfig(
        width=8, expert_width=8, experts=6, top_k=2, score=score, normalise=normalise, route_scale=1.5,
        balance_loss=0.3, z_loss=0.2,
    )  # fmt: skip
    logits, dweights = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    ids, scoring = logits.argsort(1)[:, :2], routing.scoring_of(config)
    counts = torch.bincount(ids.flatten(), minlength=6).double()
    leaf = logits.clone().requires_grad_()
    weights = routing.kernels.weigh_reference(leaf, ids, scoring)
    got = routing.kernels.weigh_gradient_reference(logits, ids, dweights, scoring)
    torch.testing.assert_close(got, torch.autograd.grad(weights, leaf, dweights)[0])
    losses = routing.auxiliary_losses(leaf, ids, counts, config)
    got = routing.auxiliary_gradient(logits, ids, counts, config)
    torch.testing.assert_close(got, torch.autograd.grad(losses, leaf)[0])
