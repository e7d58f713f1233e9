"""What a keeper costs the host is measured on small regions, and how much slower that is in a model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.profiling import overhead
from pagestash.profiling.overhead import REGIONS, Overhead, in_model, measure_overhead
from pagestash.profiling.steps import RepeatedStep
from pagestash.saved.keeper import Keeper
from pagestash.saved.recompute.value_checks import Checks


def test_a_recomputed_region_and_a_moved_group_cost_more_than_a_tensor_that_stays():
    for _ in range(5):  # a machine that does something else meanwhile is slow for one of them
        found = measure_overhead(torch.device("cpu"))
        assert found.pack > 0
        assert found.record + found.replay + found.put + found.get < 0.1
        if found.pack < min(found.record, found.put):
            return
    pytest.fail(str(found))


def test_no_values_are_checked_in_the_steps_that_are_timed(monkeypatch):
    """A check reads every value: with one, a recomputed region was measured to cost six times what it does."""
    due = Checks.due
    checked = []

    def is_due(checks, module):
        checked.append(due(checks, module))
        return checked[-1]

    monkeypatch.setattr(Checks, "due", is_due)
    measure_overhead(torch.device("cpu"))
    ways = 2 * overhead.TURNS  # two that recompute
    assert checked.count(True) == ways * REGIONS  # in the first step of each
    assert len(checked) == ways * REGIONS * (overhead.WARM + overhead.ROUNDS)


@pytest.mark.slow
def test_the_regions_are_really_recomputed_and_moved(monkeypatch):
    seen = {}
    original = Keeper.detach

    def detach(keeper):
        for home, stats in keeper.stats().homes.items():
            seen[home] = max(seen.get(home, 0), stats.peak)
        original(keeper)

    monkeypatch.setattr(Keeper, "detach", detach)
    measure_overhead(torch.device("cpu"))
    # All but the last group, which backward asks for at once.
    assert seen["offload"] == (REGIONS - 1) * 2 * 64 * 64 * 4
    assert seen["recompute"] > 0


def test_each_module_inside_a_recomputed_region_is_recorded_and_looked_at_again(monkeypatch):
    """Forward takes 1 for each module; backward takes 2 for each region, and 1 for each module that is replayed."""

    def launched(chain, device, rule):
        inside = sum(len(module.inside) for module in chain)
        forward, backward = len(chain) + inside, 2 * len(chain)
        if rule is not None and rule.home == "recompute":
            again = forward / 2
            forward += REGIONS * 5 + inside / 2 * 0.25
            backward += again + REGIONS * 7 + inside / 2 * 0.5
        return forward, backward

    monkeypatch.setattr(overhead, "_launched", launched)
    found = measure_overhead(torch.device("cpu"))
    assert found.record == pytest.approx(5)
    assert found.replay == pytest.approx(7)
    assert found.record_module == pytest.approx(0.25)
    assert found.replay_module == pytest.approx(0.5)


def test_costs_grow_by_what_a_keeper_takes_more_between_a_models_launches(monkeypatch):
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)]
    model = nn.Sequential(*layers)
    profile = ps.profile(model, torch.randn(4, 8), repeats=1)
    cost = Overhead(pack=1.0, record=10.0, replay=20.0, put=7.0, get=9.0)
    step = SimpleNamespace(model=model)
    rules = []

    def forward(step, rule):
        rules.append(rule)
        return 100.0 if rule is None else 100.0 + 2.5 * (40 * 1.0 + 3 * 10.0)

    monkeypatch.setattr(overhead, "_forward", forward)
    found = in_model(cost, step, profile.regions, 40)
    assert found == Overhead(pack=2.5, record=25.0, replay=50.0, put=7.0, get=9.0)
    assert rules[0] is None
    assert rules[1].home == "recompute"
    assert sum(rules[1].matches(region.name) for region in profile.regions) == 3
    # Never less than by themselves; and where no region is small, or the model is refused, as they are.
    monkeypatch.setattr(overhead, "_forward", lambda step, rule: 100.0)
    assert in_model(cost, step, profile.regions, 40) == cost
    assert in_model(cost, step, (), 40) == cost

    def refuse(step, rule):
        raise RuntimeError

    monkeypatch.setattr(overhead, "_forward", refuse)
    assert in_model(cost, step, profile.regions, 40) == cost


def test_a_models_forward_runs_alone_under_a_keeper_and_leaves_no_gradient():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)))
    step = RepeatedStep(
        model, (torch.randn(4, 8),), {}, torch.device("cpu"), lambda output: output.sum(), held=False
    )
    profile = ps.profile(model, step.args, repeats=1)
    found = in_model(Overhead(pack=1e-9, record=1e-9, replay=2e-9), step, profile.regions, 1)
    assert found.record > 1e-9
    assert found.replay == pytest.approx(2 * found.record)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_no_region_is_timed_where_modules_recompute_by_themselves(monkeypatch):
    class Own(nn.LayerNorm):
        def use_recompute(self, on):
            raise AssertionError

    model = nn.Sequential(*(nn.Sequential(Own(8), nn.Linear(8, 8)) for _ in range(3)))
    regions = ps.profile(model, torch.randn(4, 8), repeats=1).regions
    fast = [replace(region, forward_seconds=0.0) if ".0" in region.name else region for region in regions]
    rules = []
    monkeypatch.setattr(overhead, "_forward", lambda step, rule: rules.append(rule) or 1.0)
    in_model(Overhead(pack=1.0, record=1.0), SimpleNamespace(model=model), fast, 1)
    assert [rule and rule.match for rule in rules] == overhead.TURNS * [None, "*.1"]


@pytest.mark.parametrize("slow_turn", [0, 1])
def test_a_slow_moment_of_the_host_is_no_cost_of_a_keeper(monkeypatch, slow_turn):
    """In one turn of two, in which every second way is measured while the host is slow."""
    calls = []

    def launched(chain, device, rule):
        turn, way = divmod(len(calls), 6)
        calls.append(rule)
        slower = 3.0 if slows and turn == slow_turn and way % 2 else 1.0
        return (slower * (1.0 if rule is None else len(rule.home)), slower)

    monkeypatch.setattr(overhead, "_launched", launched)
    slows = False
    steady = measure_overhead(torch.device("cpu"))
    calls.clear()
    slows = True
    assert measure_overhead(torch.device("cpu")) == steady
    assert len(calls) == 6 * overhead.TURNS
    assert steady.record > 0


@pytest.mark.parametrize("times", [(1.0, 9.0, 1.0, 5.0), (3.0, 5.0, 1.0, 9.0)])
def test_in_a_model_the_fastest_turns_count(monkeypatch, times):
    """Forward without a keeper and with one, in turn: 1 and 5 are those of a quick host."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)))
    regions = ps.profile(model, torch.randn(4, 8), repeats=1).regions
    rest = iter(times)
    monkeypatch.setattr(overhead, "_forward", lambda step, rule: next(rest))
    found = in_model(Overhead(record=0.5), SimpleNamespace(model=model), regions, 0)
    assert found.record == pytest.approx(4 / 3)
