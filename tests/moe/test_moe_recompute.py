"""Recomputed MoE layers: tokens are routed and sent once, and what waits in pages is put there once."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.rows import padded_rows
from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig
from pagestash.moe import experts as experts_file
from pagestash.moe import router as router_file

D, T = 32, 40
CONFIG = MoEConfig(
    width=D,
    expert_width=24,
    experts=4,
    top_k=2,
    shared_experts=1,
    capacity=64,
    correction_bias=True,
    score="sigmoid",
)


class Layer(nn.Module):
    def __init__(self, dispatch) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(D), MoE(CONFIG, dispatch=dispatch)

    def forward(self, x):
        y, aux = self.moe(self.norm(x))
        return (x + y).tanh() + aux


class Counts:
    """Calls of the functions that decide, and of a dispatch's wire."""

    def __init__(self, monkeypatch, dispatches) -> None:
        self.calls: dict[str, int] = {}
        self.count(monkeypatch, router_file, "choose_experts")
        self.count(monkeypatch, experts_file, "route")
        for dispatch in dispatches:
            self.count(monkeypatch, dispatch, "send")

    def count(self, monkeypatch, owner, name):
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            self.calls[name] = self.calls.get(name, 0) + 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


def make(kind):
    torch.manual_seed(0)
    dispatches = {
        "local": lambda: None,
        "all-gather": lambda: AllGather(CONFIG, max_tokens=T),
        "all-to-all": lambda: AllToAll(CONFIG, max_tokens=T),
        "expected": lambda: AllGather(replace(CONFIG, expected_rows=30), max_tokens=T),
    }
    return nn.Sequential(*(Layer(dispatches[kind]()) for _ in range(2)))


def step(model, x, keeper=None):
    model.zero_grad()
    x = x.clone().requires_grad_()
    if keeper is None:
        loss = model(x).square().sum()
        loss.backward()
    else:
        with keeper.step():
            loss = model(x).square().sum()
            loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


RULES = {
    "layer": {"*": "recompute"},
    "moe": {"*.moe": "recompute"},
    "experts and router": {"*.moe.experts": "recompute", "*.moe.router": "recompute"},
    "pages inside": {"*": "recompute", "*.moe.moe_act": "stash", "*.moe.expert_fc1": "stash"},
    "pages around": {"*": "stash", "*.moe": "recompute"},
    "offload around": {"*": "offload", "*.moe": "recompute"},
}


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", ["local", "all-gather", "all-to-all", "expected"])
def test_tokens_are_routed_and_sent_once(kind, rules, monkeypatch):
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    model = make(kind)
    plain = [step(model, x) for _ in range(3)]
    expected = [buffer.clone() for buffer in model.buffers()]
    model = make(kind)
    policy = ps.Policy([ps.Rule(match, home, min_bytes=16) for match, home in rules.items()])
    keeper = ps.Keeper(policy, backend="torch").attach(model)
    counts = Counts(monkeypatch, [layer.moe.experts.dispatch for layer in model if kind != "local"])
    for number in range(3):
        assert same(step(model, x, keeper), plain[number])
        once_a_layer = 2 * (number + 1)
        assert counts.calls["choose_experts"] == once_a_layer
        assert counts.calls["route" if kind == "local" else "send"] == once_a_layer
    assert same(model.buffers(), expected)
    assert not any(int(size) for size in keeper.held().values())


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("tokens", [1, 2, T // 2])
def test_expected_rows_that_nobody_wrote_are_not_compared(tokens):
    model = make("expected")
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", "recompute")]), backend="torch").attach(model)
    allocate, fills = torch.Tensor.new_empty, itertools.count()

    def filled(self, *size, **kind):
        made = allocate(self, *size, **kind)
        return made.fill_(float(next(fills))) if made.is_floating_point() else made

    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(torch.Tensor, "new_empty", filled):
        kept = step(model, x, keeper)
        assert same(kept, step(model, x))


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("kind", ["local", "all-gather", "expected"])
def test_pages_are_written_once(kind):
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    written = []
    for around in ("keep", "recompute"):
        rules = [ps.Rule("*", around), ps.Rule("*.moe.moe_act", "stash", min_bytes=16)]
        model = make(kind)
        keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(model)
        step(model, x, keeper)
        before = keeper.reservations
        step(model, x, keeper)
        written.append((keeper.reservations - before, keeper.stats().pool.device.wanted))
    assert written[0] == written[1]


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("home", ["keep", "stash"])
def test_received_slots_wait_where_the_rule_for_expert_fc1_says(home):
    """A recomputed layer needs them: they cannot be sent a second time."""
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    rules = [ps.Rule("*", "recompute"), ps.Rule("*.moe.expert_fc1", home, min_bytes=16)]
    model = make("all-gather")
    keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(model)
    for _ in range(2):
        step(model, x, keeper)
    rows = CONFIG.capacity * D * 4 if home == "stash" else padded_rows(CONFIG.capacity) * D * 4
    for number in range(2):
        assert keeper.stats().regions[f"{number}.moe.expert_fc1"].peak == rows + T * D * 4


def test_a_region_of_another_home_between_two_recomputed_ones_has_the_weights_of_a_functional_call():
    """Those of the experts belong to modules beside `experts`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(MoEConfig(width=D, expert_width=16, experts=4, top_k=2))

        def forward(self, x):
            return x + self.moe(x)[0]

    homes = {"1": "recompute", "1.moe": "offload", "1.moe.experts": "recompute"}
    rules = [ps.Rule(name, home, min_bytes=0) for name, home in homes.items()]
    found = []
    for chosen in ([], rules):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Layer())
        keeper = ps.Keeper(ps.Policy(chosen), backend="torch").attach(model)
        for step in range(3):
            weights = {n: (p.detach() * (1 + step)).requires_grad_() for n, p in model.named_parameters()}
            with keeper.step():
                torch.func.functional_call(model, weights, (torch.randn(20, D),)).square().mean().backward()
        found.append([weight.grad for weight in weights.values()])
    assert same(*found)
