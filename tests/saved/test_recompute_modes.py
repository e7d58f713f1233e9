"""Recomputed modules that do something else in training than in evaluation, where the first steps were."""

import random

import pytest
import torch
from torch import nn

import pagestash as ps


class Jittered(nn.Module):
    """Draws from Python's generator in training."""

    def forward(self, x):
        return (x * (1.0 + random.random() if self.training else 1.0)).tanh()


def trained(make, *, recompute):
    """Gradients of steps, the first of them in evaluation, and what is left of buffers and the generator."""
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    keeper = None
    if recompute:
        rules = [ps.Rule(name, "recompute", min_bytes=0) for name in ("1", "2")]
        keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(model)
    found = []
    for number in range(6):
        model.train(number in (2, 3, 5))
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        if keeper is None:
            model(x).square().mean().backward()
        else:
            with keeper.step():
                model(x).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return [*found, *model.buffers(), torch.tensor(random.random())]


@pytest.mark.parametrize(
    "make",
    [
        # More than 64 KiB of statistics, which torch updates without raising their version.
        lambda: nn.Sequential(nn.Linear(16, 20000), nn.BatchNorm1d(20000), nn.Linear(20000, 4)),
        lambda: nn.Sequential(nn.Linear(16, 16), Jittered(), nn.Linear(16, 4)),
    ],
    ids=["large buffers", "random numbers of Python"],
)
def test_what_training_does_after_evaluation_is_found(make):
    plain, ours = trained(make, recompute=False), trained(make, recompute=True)
    assert all(map(torch.equal, plain, ours))
