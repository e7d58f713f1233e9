"""MoE layers whose experts write the keeper's pool from their own kernels, in one graph."""

import pytest
import torch
from support import same
from support.steps import training_step
from torch import nn

import pagestash as ps
from pagestash.moe import MoE, MoEConfig

pytestmark = pytest.mark.gpu
WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 256, 128, 8, 2, 512, 4
PROJECTIONS = DEPTH * TOKENS * TOP_K * 2 * INNER * 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "moe": MoE(config)}) for _ in range(DEPTH)
        )

    def forward(self, x):
        total = torch.zeros((), device=x.device)
        for layer in self.layers:
            y, aux = layer["moe"](layer["norm"](x))
            x, total = x + y, total + aux
        return x.float().square().mean() + total


def train(rule, steps=7, **pool):
    torch.manual_seed(0)
    model = Stack().to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rules = [ps.Rule("layers.*.moe.experts", "stash")] if rule else []
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page="16KiB", **pool))).attach(model)
    step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        losses.append(step(torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)))
    step.wait()
    return torch.stack(losses), [p.detach().clone() for p in model.parameters()], keeper, step


def test_stashed_experts_in_a_graph_train_to_the_same_bits():
    plain, stashed = train(False), train(True)
    assert same(plain[:2], stashed[:2])
    stats = stashed[2].stats()
    assert stats.homes["stash"].peak == PROJECTIONS
    assert (stats.pool.device.in_use, stats.overflow, stats.pool.given_up_groups) == (0, False, 0)
    assert stashed[3].reruns == 0


@pytest.mark.parametrize("share", [0.6, 0.3, 0.01])
def test_a_short_pool_makes_projections_again_in_the_same_graph(share):
    plain, short = train(False), train(True, device=int(share * PROJECTIONS))
    assert same(plain[:2], short[:2])
    stats = short[2].stats()
    assert stats.pool.given_up_groups > 0
    assert not stats.overflow
    assert short[3].reruns == 0
