"""A plan has no rule that moves nothing, unless others need it: nobody wrote it, and a keeper would warn of it."""

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.planning import plan_profile, predict
from pagestash.profiling import Link


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Its last norm is asked for so soon that it stays under any offload rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).square().mean()


@pytest.fixture(scope="module")
def measured():
    model, x = Net(), torch.randn(256, 64)
    return model, x, ps.profile(model, x, repeats=1, link=Link(out=1e12, back=1e12))


def idle(policy, predicted, profile):
    """Offload rules under which nothing leaves."""
    found = []
    for rule in policy.rules:
        names = [region.name for region in profile.regions if region.name and rule.matches(region.name)]
        if rule.home == "offload" and not any(name in predicted.moving for name in names):
            found.append(rule)
    return found


def convolutions():
    torch.manual_seed(0)
    layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*[module for layer in layers for module in layer])
    return ps.profile(model, torch.randn(4, 16, 16, 16), repeats=1, link=Link(out=1e12, back=1e12))


@pytest.mark.parametrize(
    ("host", "part"),
    [("auto", 0.8), ("auto", 0.7), ("auto", 0.6), ("auto", 0.5), (196800, 0.8), (196800, 0.7)],
)
def test_a_rule_that_moves_nothing_is_there_only_if_the_others_need_it(measured, host, part):
    profile = measured[-1] if host == "auto" else convolutions()
    plan = plan_profile(profile, budget=part, host=host)
    base = plan.predicted.memory["base"][0]
    for rule in idle(plan.policy, plan.predicted, profile):
        left = ps.Policy([other for other in plan.policy.rules if other is not rule])
        found = predict(profile, left, base_bytes=base)
        slower = found.mean_seconds > plan.predicted.mean_seconds
        assert slower or found.peak_bytes > plan.budget_bytes


def test_a_link_that_was_not_measured_is_named(measured):
    _, _, profile = measured
    plan = plan_profile(profile, budget=0.5)
    assert "the link was not measured: 1000 GB/s out, 1000 GB/s back are assumed" in str(plan)
    assert "assumed" not in str(plan_profile(profile, budget=0.7, host=0))
