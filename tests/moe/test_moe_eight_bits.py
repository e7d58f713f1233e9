"""MoE layers under `bits=8`: rows and projections wait in half the bytes; what is routed where stays exact."""

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.kernels.pages.eight_bits import CodeShape
from pagestash.moe import MoE, MoEConfig, Received

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 128, 64, 4, 2, 64, 2
CHOICES = TOKENS * TOP_K
ROW = 2 * (128 + 16)  # coded: 128 values of the row and 128 of its projection, each with a scale in 16 bytes


class Loopback:
    """A dispatch whose wire ends where it starts, with room for twice the rows."""

    experts = EXPERTS

    def __init__(self, expected):
        self.expected = expected

    def send(self, x, ids, weights, over):
        routing = route(ids, EXPERTS, capacity=2 * CHOICES, over=over)
        return Received(x, weights, ids, routing, self.expected)

    def collect(self, slots, received):
        return slots


class Stack(nn.Module):
    def __init__(self, expected: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        dispatches = [None if expected is None else Loopback(expected) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(MoE(config, dispatch=dispatch) for dispatch in dispatches)
        self.to(torch.bfloat16)

    def forward(self, x):
        for layer in self.layers:
            y, aux = layer(x)
            x = x + y
        return x.float().square().mean() + aux


def run(model, x, keeper=None):
    model.zero_grad()
    if keeper is None:
        model(x).backward()
    else:
        with keeper.step():
            model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def policy(bits=8, page=1024, **pool):
    rule = ps.Rule("layers.*.experts", "stash", min_bytes=2048, bits=bits)
    return ps.Policy([rule], ps.PoolConfig(page=page, headroom=1.5, **pool))


@pytest.mark.parametrize("expected", [None, 0, 60, 2 * CHOICES])
def test_gradients_are_near_the_exact_ones_and_the_same_in_every_step(backend, expected):
    model, x = Stack(expected), torch.randn(TOKENS, WIDTH).bfloat16()
    plain = run(model, x)
    keeper = ps.Keeper(policy(), backend=backend).attach(model)
    measured = run(model, x, keeper)
    for _ in range(2):
        assert same(run(model, x, keeper), measured)
    for found, exact in zip(measured, plain):
        assert (found - exact).norm() <= 0.1 * exact.norm() + 1e-6
    assert not same(measured, plain)
    keeper.detach()


@pytest.mark.parametrize("expected", [0, 60, 2 * CHOICES])
def test_excess_rows_are_coded_in_pages_and_expected_ones_where_they_are_kept(expected):
    model, x = Stack(expected), torch.randn(TOKENS, WIDTH).bfloat16()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, x, keeper)
    keeper.reset_peaks()
    run(model, x, keeper)
    stats = keeper.stats()
    beyond = max(CHOICES - expected, 0)
    assert stats.homes["stash"].peak == DEPTH * beyond * ROW
    kept = stats.regions["layers.1.experts"].peak - beyond * ROW
    stays = 2 * CodeShape.of(expected * WIDTH).bytes
    assert stays <= kept < stays + 8192  # and indices
    keeper.detach()


def test_a_pool_without_pages_keeps_the_codes():
    model, x = Stack(0), torch.randn(TOKENS, WIDTH).bfloat16()
    enough = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, x, enough)
    expected = run(model, x, enough)
    enough.detach()
    short = ps.Keeper(policy(device=4096), backend="torch").attach(model)
    assert same(run(model, x, short), expected)
    assert short.stats().no_page.groups > 0
    assert same(run(model, x, short), expected)
    short.detach()
