"""`MoE` inside a compiled graph: one operator each for the router, the experts and the shared experts."""

import shutil

import pytest
import torch
from support.compare import same
from support.tiers import slow, slow_but
from torch import nn
from torch.library import opcheck

import pagestash as ps
from pagestash.kernels.moe.activation import Activation
from pagestash.moe import MoE, MoEConfig
from pagestash.moe.local import traced_experts
from pagestash.moe.projection import Weight

LAYERS = {
    "plain": {},
    "losses, bias, shared": {
        "balance_loss": 0.1,
        "z_loss": 0.01,
        "activation": "clamped",
        "bias": True,
        "shared_experts": 1,
    },
    "groups, no gate": {
        "score": "sigmoid",
        "correction_bias": True,
        "groups": 2,
        "balance_loss": 0.1,
        "activation": Activation(curve="relu2", gated=False),
    },
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, **changes):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.moe = MoE(MoEConfig(**{"width": 16, "expert_width": 8, "experts": 4, "top_k": 2} | changes))

    def forward(self, x):
        y, aux = self.moe(self.up(x))
        return x + y, aux


def step(run, modules, x):
    modules.zero_grad()
    x = x.clone().requires_grad_()
    y, aux = run(x)
    (y.square().sum() + aux).backward()
    return [y.detach(), aux.detach(), x.grad, *(p.grad.clone() for p in modules.parameters())]


@pytest.mark.parametrize("name", slow_but(["groups, no gate"], LAYERS))
@pytest.mark.parametrize("compiler", [*slow("eager"), "aot_eager"])
def test_a_layer_is_one_graph_with_the_same_bits(name, compiler):
    block, x = Block(**LAYERS[name]), torch.randn(3, 5, 16)
    compiled = torch.compile(block, backend=compiler, fullgraph=True)
    for tokens in (x, x, x[:1]):
        assert same(step(compiled, block, tokens), step(block, block, tokens))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_bits():
    moe, x = MoE(MoEConfig(width=16, expert_width=8, experts=4, top_k=2, z_loss=0.1)), torch.randn(15, 16)
    assert same(step(torch.compile(moe, fullgraph=True), moe, x), step(moe, moe, x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(shared_experts=1, correction_bias=True) for _ in range(2))

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, aux = layer(x)
            total = total + aux
        return x, total


@pytest.mark.parametrize("home", ["stash", *slow("offload", "recompute")])
def test_rules_for_compiled_layers_change_no_bit(home):
    model, x = Model(), torch.randn(12, 16)
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    plain = [step(model, model, x) for _ in range(3)]
    load = [layer.moe.router.load.clone() for layer in model.layers]
    for layer in model.layers:
        layer.moe.router.load.zero_()
    more = {"prefetch_bytes": 0} if home == "offload" else {}
    rule = ps.Rule("layers.*", home, min_bytes=0, **more)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=64))).attach(model)
    for wanted in plain:
        with keeper.step():
            assert same(step(model, model, x), wanted)
    assert keeper.stats().homes[home].peak > 0
    assert same([layer.moe.router.load for layer in model.layers], load)


def test_a_rule_for_a_part_ends_the_graph_before_the_experts():
    block, x = Block(), torch.randn(12, 16)
    plain = [step(block, block, x) for _ in range(3)]
    keeper = ps.Keeper(ps.Policy([ps.Rule("moe.moe_act", "stash", min_bytes=0)])).attach(block)
    compiled = torch.compile(block, backend="aot_eager")
    for wanted in plain:
        with keeper.step():
            assert same(step(compiled, block, x), wanted)
    assert keeper.stats().homes["stash"].peak > 0


def test_operators_pass_opcheck():
    x, ids = torch.randn(6, 16, requires_grad=True), torch.rand(6, 4).argsort(1)[:, :2].to(torch.int32)
    shapes = [(4, 16, 16), (4, 16), (4, 2, 16), (4, 16, 2), (4, 16, 8), (4, 16), (4, 2, 8), (4, 16, 2)]
    up, up_bias, up_a, up_b, down, down_bias, down_a, down_b = (
        torch.randn(shape, requires_grad=True) for shape in shapes
    )
    weights = torch.rand(6, 2, requires_grad=True)
    act = ("sigmoid", 1.0, None, 0.0, True)
    ops = torch.ops.pagestash
    every = (up, up_bias, up_a, up_b, down, down_bias, down_a, down_b)
    for matrices in [every, (up, None, None, None, down, None, None, None)]:
        opcheck(ops.experts.default, (x, weights, *matrices, ids, *act, True, 2.0, 1.0))
    opcheck(ops.shared_experts.default, (x, up[:1].detach(), down[:1].detach(), *act))
    gate, correction = torch.randn(4, 16, requires_grad=True), torch.randn(4)
    opcheck(ops.router.default, (x, gate, correction, 2, "sigmoid", True, 1.0, 1, 1, 0.1, 0.1))


def test_weights_that_are_stored_the_other_way_round_have_such_gradients():
    x, ids = torch.randn(6, 16), torch.rand(6, 4).argsort(1)[:, :2]
    stored = [torch.randn(4, 16, 16).requires_grad_(), torch.randn(4, 8, 16).requires_grad_()]

    def run(x, weights):
        up, down = (Weight(each.mT) for each in stored)
        return traced_experts(x, weights, up, down, ids, "silu", interleaved=False)

    weights = torch.rand(6, 2)
    wanted = torch.autograd.grad(run(x, weights).sum(), stored)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert same(torch.autograd.grad(compiled(x, weights).sum(), stored), wanted)
