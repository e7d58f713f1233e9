"""Buffers of equal length that mean different things: the head, the rest, and the slots they came in."""

import functools
from contextlib import nullcontext

import pytest
import torch
from support import same
from support.tiers import slow
from torch import nn

import pagestash as ps
from pagestash.moe import AllGather, MoE, MoEConfig

TOKENS, SLOTS, WIDTH = 32, 64, 32


pytestmark = pytest.mark.usefixtures("lone_rank")


@functools.cache  # without rules, they are what each rule's are compared with
def gradients(expected, *rules):
    torch.manual_seed(0)
    config = MoEConfig(width=WIDTH, expert_width=16, experts=4, top_k=2, expected_rows=expected)
    model = nn.ModuleDict({"moe": MoE(config, dispatch=AllGather(config, max_tokens=SLOTS))})
    keeper = None
    if rules:
        policy = ps.Policy(rules, ps.PoolConfig(page=1024))
        keeper = ps.Keeper(policy, backend="torch").attach(model)
    found = []
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(step + 10)
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with keeper.step() if keeper else nullcontext():
            y, _ = model["moe"](x)
            (y * torch.arange(1, WIDTH + 1)).sum().backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("expected", [32, *slow(0, 60, 64)])
@pytest.mark.parametrize("home", ["stash", "offload"])
@pytest.mark.parametrize("match", ["moe.expert_fc1", "moe.moe_act", "moe.experts"])
def test_a_tensor_of_as_many_rows_is_not_taken_for_rows(expected, home, match):
    """Capacity is twice 64: with 64 rows expected the head, the rest and the slots are all 64 long."""
    plain = gradients(expected)
    extra = {"prefetch_bytes": 0} if home == "offload" else {}
    moved = gradients(expected, ps.Rule(match, home, min_bytes=1, **extra))
    assert same(moved, plain)
