"""MoE layers under a keeper: fused into the pool, same bits, and a short pool costs time, not the step."""

import functools
import math

import pytest
import torch
from support import same
from support.steps import loss_and_gradients
from support.tiers import slow
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.rows import padded_rows
from pagestash.moe import MoE, MoEConfig, Received

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 32, 24, 4, 2, 48, 3


class Layer(nn.Module):
    def __init__(self, dispatch=None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        self.moe = MoE(config, dispatch=dispatch)

    def forward(self, x):
        y, aux = self.moe(self.norm(x))
        return x + y, aux


class Stack(nn.Module):
    def __init__(self, make_dispatch=lambda: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(make_dispatch()) for _ in range(DEPTH))

    def forward(self, x):
        total = x.new_zeros(())
        for layer in self.layers:
            x, aux = layer(x)
            total = total + aux
        return x.square().mean() + total


def policy(**pool) -> ps.Policy:
    rule = ps.Rule("layers.*.moe.experts", "stash", min_bytes=2048)
    return ps.Policy([rule], ps.PoolConfig(page=1024, **pool))


@pytest.fixture
def made():
    return *local(), kept()


def local():
    torch.manual_seed(0)
    return Stack(), torch.randn(TOKENS, WIDTH)


@functools.cache
def kept():
    """What `local()` gives without a keeper."""
    return loss_and_gradients(*local())


def test_experts_use_the_keepers_pool_and_give_the_same_bits(made):
    model, x, plain = made
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    # Measured: saved through autograd, valid rows only.
    assert same(loss_and_gradients(model, x, keeper), plain)
    assert keeper.pool is not None
    experts = model.layers[0].moe.experts
    assert experts.pool is keeper.pool
    assert same(loss_and_gradients(model, x, keeper), plain)  # fused
    stats = keeper.stats()
    assert stats.pool.device.in_use == 0
    assert (
        stats.homes["stash"].peak == DEPTH * TOKENS * TOP_K * 2 * INNER * 4
    )  # the first projections, in fp32
    assert not stats.overflow
    keeper.detach()
    assert experts.pool is None


def test_what_the_router_keeps_is_not_stashed_again(made):
    model, x, _ = made
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    loss_and_gradients(model, x, keeper)
    measured = keeper.stats()
    loss_and_gradients(model, x, keeper)
    # In the measured step, too, only the projections were taken: the layer's input is alive in any case.
    assert keeper.pool.device_pages < 1.2 * measured.pool.device.pages


@pytest.mark.parametrize("pages", [12, 1, *slow(1000, 30, 5)])
def test_a_short_pool_costs_time_and_no_bit(made, pages):
    model, x, plain = made
    keeper = ps.Keeper(policy(device=pages * 1024), backend="torch").attach(model)
    for _ in range(2):
        assert same(loss_and_gradients(model, x, keeper), plain)
    stats = keeper.stats()
    assert not stats.overflow
    assert (stats.pool.given_up_groups > 0) == (pages < 3 * 18)
    assert keeper.pool.device_pages == pages


def test_casts_of_weights_under_autocast_are_neither_kept_nor_stashed(made):
    model, x, _ = made
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    for _ in range(2):
        with keeper.step(), torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
            loss.backward()
    stats = keeper.stats()
    assert stats.homes["stash"].peak == DEPTH * TOKENS * TOP_K * 2 * INNER * 2  # the projections, in bf16
    # What is kept is the norms' and the router's; copies of the experts' weights alone would be more.
    weights = [part.weight for layer in model.layers for part in (layer.moe.expert_fc1, layer.moe.expert_fc2)]
    copies = sum(weight.nbytes // 2 for weight in weights)
    assert stats.homes["keep"].peak < copies


class Loopback:
    """A dispatch whose wire ends where it starts, with room for twice the rows."""

    experts = EXPERTS

    def __init__(self, expected):
        self.expected = expected

    def send(self, x, ids, weights, over):
        routing = route(ids, EXPERTS, capacity=2 * TOKENS * TOP_K, over=over)
        return Received(x, weights, ids, routing, self.expected)

    def collect(self, slots, received):
        return slots


def received(expected):
    torch.manual_seed(0)
    return Stack(lambda: Loopback(expected)), torch.randn(TOKENS, WIDTH)


@functools.cache
def kept_of_received(expected, references=False):
    """What `received(expected)` gives without a keeper; by the `references` has other bits than by the kernels."""
    return loss_and_gradients(*received(expected))


@pytest.mark.parametrize("expected", [60, *slow(0, 2 * TOKENS * TOP_K)])
def test_expected_rows_stay_and_the_others_go_to_pages(expected):
    (model, x), plain = received(expected), kept_of_received(expected)
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    beyond, head = max(TOKENS * TOP_K - expected, 0), expected
    assert same(loss_and_gradients(model, x, keeper), plain)  # measured: what stays takes no pages
    pages = DEPTH * sum(-(-beyond * width * 4 // 1024) for width in (WIDTH, 2 * INNER))
    assert (keeper.pool.device_pages if beyond else 0) == math.ceil(1.1 * pages)
    keeper.reset_peaks()
    assert same(loss_and_gradients(model, x, keeper), plain)
    stats, row = keeper.stats(), (WIDTH + 2 * INNER) * 4
    assert stats.homes["stash"].peak == DEPTH * beyond * row
    kept = stats.regions["layers.1.moe.experts"].peak - beyond * row
    stays = padded_rows(head) * WIDTH * 4 + head * 2 * INNER * 4
    assert stays <= kept < stays + 8192  # and indices
    assert not stats.overflow


@pytest.mark.parametrize("pages", [1, 5, 14, 30, 60])
@pytest.mark.parametrize("expected", [60, *slow(0)])
def test_received_rows_that_find_no_page_stay_where_they_are(expected, pages, request):
    references = (expected, pages) not in ((0, 14), (60, 5))  # interpreted kernels are slow
    if not references:
        request.getfixturevalue("interpreted_kernels")
    (model, x), plain = received(expected), kept_of_received(expected, references)
    keeper = ps.Keeper(policy(device=pages * 1024, headroom=1.0), backend="torch").attach(model)
    assert same(loss_and_gradients(model, x, keeper), plain)
    rows_pages = DEPTH * -(-(TOKENS * TOP_K - expected) * WIDTH * 4 // 1024)
    if pages < rows_pages:
        assert keeper.stats().no_page.groups > 0
    # Where only what is expendable stood in the way, it gives way the next time.
    assert (keeper.pool.device_pages > pages) == (pages < rows_pages)
    keeper.reset_peaks()
    assert same(loss_and_gradients(model, x, keeper), plain)
    stats = keeper.stats()
    assert (stats.no_page.groups, stats.overflow, stats.pool.device.in_use) == (0, False, 0)
