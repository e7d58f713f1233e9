"""Plans of models whose layers are single modules in a row, as in `nn.Sequential`.

Such a layer may save nothing but its input. Recomputing it frees what the next layer saves.
"""

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.planning import plan_profile
from pagestash.profiling.memory import MemoryMeter


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        *[layer for _ in range(6) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    ), torch.randn(512, 64)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            layer
            for _ in range(6)
            for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        ]
    ), torch.randn(16, 16, 16, 16)


def steps(model, x, policy=None):
    """Gradients of the third step, and its peak above what was there before."""
    keeper = None if policy is None else ps.Keeper(policy, backend="torch").attach(model)
    meter = MemoryMeter(torch.device("cpu"))
    for _ in range(3):  # the first is measured
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with meter:
            begun = meter.mark()
            if keeper is None:
                model(x).square().mean().backward()
            else:
                with keeper.step():
                    model(x).square().mean().backward()
            ended = meter.mark()
    if keeper is not None:
        keeper.detach()
    return [parameter.grad for parameter in model.parameters()], ended.peak - begun.now


@pytest.mark.parametrize("part", [0.9, 0.7, 0.5])
def test_part_of_the_bytes_of_a_perceptron_is_planned_for_and_kept(part):
    model, x = perceptron()
    profile = ps.profile(model, x, loss=lambda out: out.square().mean(), repeats=1)
    plan = plan_profile(profile, budget=part, host=0)
    assert plan.policy.rules
    wanted, most = steps(model, x)
    found, peak = steps(model, x, plan.policy)
    assert same(found, wanted)
    base = plan.unplanned.peak_bytes - most
    assert peak + base <= plan.budget_bytes
    assert peak + base == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


@pytest.mark.parametrize("build", [perceptron, convolutions])
@pytest.mark.parametrize("host", [0, "1GiB"])
def test_what_fits_by_hand_is_never_refused(build, host):
    model, x = build()
    profile = ps.profile(model, x, repeats=1)
    by_hand = plan_profile(profile, budget="1GiB", host=host).alternatives
    assert len(by_hand) == (2 if host == 0 else 3)
    for other in by_hand.values():
        plan = plan_profile(profile, budget=other.peak_bytes, host=host)
        assert plan.predicted.peak_bytes <= other.peak_bytes
        assert plan.predicted.mean_seconds <= other.mean_seconds


def test_the_layers_before_and_after_a_cheap_one_are_found():
    """An activation keeps its input; what it frees is saved by the linear layer after it."""
    model, x = perceptron()
    plan = plan_profile(ps.profile(model, x, repeats=1), budget=0.9, host=0)
    assert plan.predicted.peak_bytes < plan.unplanned.peak_bytes
    assert plan.predicted.recompute_seconds < 0.5 * plan.alternatives["recompute layers"].recompute_seconds


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_layer_that_saves_its_own_output_can_be_offloaded_where_others_are_not(activation):
    """The layer after it saves the same storage."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), activation())])
    profile = ps.profile(model, torch.randn(512, 256), repeats=1)
    plan = plan_profile(profile, budget=0.8, host="2MiB")  # half of what it saves
    homes = {rule.home for rule in plan.policy.rules}
    assert "offload" in homes
    by_hand = plan.alternatives["recompute layers"]
    assert plan.predicted.mean_seconds < plan.unplanned.mean_seconds + 0.5 * (
        by_hand.mean_seconds - plan.unplanned.mean_seconds
    )
