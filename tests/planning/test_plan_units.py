"""Plans for models whose layers are not at the top."""

import torch
from support import same
from torch import nn

import pagestash as ps

WIDTH = 64


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()  # which the body itself saves


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x):
        return self.body(x)


def test_layers_inside_a_module_that_saves_tensors_are_planned_one_by_one():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 64, WIDTH)
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    plan = ps.plan(model, x, budget=0.8, repeats=1)
    assert plan.policy.rules
    assert all(rule.match.startswith("body.layers.") for rule in plan.policy.rules)
    keeper = ps.Keeper(plan.policy).attach(model)
    for _ in range(2):
        model.zero_grad()
        with keeper.step():
            model(x).backward()
        assert same([p.grad for p in model.parameters()], plain)
