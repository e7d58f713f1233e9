"""On a GPU, too, a figure with its graph that a module keeps is planned around, and its backward is right."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from support import same

pytestmark = pytest.mark.gpu

WIDTH = 256


class Reporting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.figure = None

    def forward(self, x):
        y = self.linear(x).tanh()
        self.figure = (self.scale * y.detach()).softmax(-1).square().mean()
        return y


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[Reporting() for _ in range(6)], nn.Linear(WIDTH, 1)).cuda()


def gradients(model):
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def figures(model):
    sum(layer.figure for layer in model if isinstance(layer, Reporting)).backward()
    return gradients(model)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("home", "more"),
    [("stash", {}), ("offload", {"prefetch_bytes": 0}), ("offload", {"prefetch_bytes": 0, "fraction": 0.5})],
)
def test_a_kept_figure_is_planned_around_and_its_own_backward_is_right(home, more, late):
    plain, model = build(), build()
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", home, min_bytes=256, **more)])).attach(model)
    held = []
    for step in range(12):
        x = torch.randn(256, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        with keeper.step():
            model(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert same(gradients(model), gradients(plain))
        if late and step % 3 != 1:
            assert same(figures(model), figures(plain))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert (keeper.pool if home == "stash" else keeper._offload.plan) is not None
    assert max(held[-3:]) < max(held[-6:-3]) + (512 << 10)  # one step's figures have 1.5 MiB
