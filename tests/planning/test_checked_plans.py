"""A plan is checked by a step under it, and made again for less where that exceeds the budget."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from support import same
from support.tiers import slow

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import NothingFits, checked, make, plan_profile
from pagestash.profiling import Link
from pagestash.profiling.memory import MemoryMeter

LINK = Link(out=1e15, back=1e15)  # on a CPU a copy is over when it returns


def batch(length=64):
    tokens = torch.randint(0, 256, (2, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


@cache
def profiled():
    model = Decoder(preset("tiny", layers=4))
    model.initialise(0)
    return model, ps.profile(model, batch(), repeats=1, link=LINK)


@pytest.fixture
def decoder():
    return profiled()


def planned(decoder, budget=0.8, host=0):
    model, profile = decoder
    return ps.plan(model, batch(), budget=budget, profile=profile, host=host)


def peak_of_a_step(model, policy):
    """Weights and gradients included."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    keeper = ps.Keeper(policy).attach(model)
    for number in range(3):
        with MemoryMeter(torch.device("cpu")) if number == 2 else nullcontext() as meter:
            if meter is not None:
                meter.mark()
            with keeper.step():
                sum(model(*batch())).backward()
            peak = meter.mark().peak if meter is not None else 0
    keeper.detach()
    model.zero_grad(set_to_none=True)
    held = sum(2 * each.nbytes for each in model.parameters()) + sum(each.nbytes for each in model.buffers())
    return held + peak


@pytest.mark.parametrize("budget", [*slow(0.8), 0.6])
@pytest.mark.parametrize("host", ["1GiB", *slow(0)])
def test_the_measured_peak_is_that_of_a_step_and_within_the_budget(decoder, budget, host):
    plan = planned(decoder, budget, host)
    assert plan.measured_bytes == pytest.approx(peak_of_a_step(decoder[0], plan.policy), rel=1e-3)
    assert plan.measured_bytes <= plan.budget_bytes
    assert "checked    by a step: peak measured" in str(plan)


def test_a_plan_from_a_profile_alone_is_not_checked_and_says_so(decoder):
    plan = plan_profile(decoder[1], budget=0.8)
    assert plan.measured_bytes is None
    assert "checked    not by a step" in str(plan)


def test_the_step_that_checks_leaves_gradients_random_state_and_modules_as_they_were(decoder):
    model, _ = decoder
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    planned(decoder)
    assert all(p.grad is old for p, old in zip(model.parameters(), before[0]))
    assert same([p.grad for p in model.parameters()], before[1])
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert torch.equal(torch.get_rng_state(), random)
    model.zero_grad(set_to_none=True)


@pytest.fixture
def more(monkeypatch):
    """Steps take so many bytes more than they do."""

    def add(size):
        def measure_under(*given, **named):
            found = checked.measure_under(*given, **named)
            return replace(found, peak_bytes=found.peak_bytes + size)

        monkeypatch.setattr(make, "measure_under", measure_under)

    return add


def test_a_plan_whose_step_takes_more_than_predicted_is_made_again_for_less(decoder, more):
    first = planned(decoder)
    more(first.budget_bytes - first.measured_bytes + 4096)
    plan = planned(decoder)
    assert plan.budget_bytes == first.budget_bytes
    assert plan.planned_for < plan.budget_bytes
    assert plan.predicted.peak_bytes <= plan.planned_for
    assert plan.measured_bytes <= plan.budget_bytes
    assert plan.policy != first.policy
    assert "less than the budget, to keep it" in str(plan)


@pytest.mark.slow
def test_a_plan_leaves_a_thousandth_of_the_budget_free(decoder, more):
    first = planned(decoder)
    budget = first.budget_bytes
    # That of the first plan is within the budget, but only just.
    more(budget - budget // 2000 - first.measured_bytes)
    plan = planned(decoder)
    assert plan.policy != first.policy
    assert plan.measured_bytes <= budget - budget // 1024


def a_plan(limit, peak):
    """One that is predicted to have this peak."""
    policy = ps.Policy([ps.Rule("*", "offload", min_bytes=peak)])
    unplanned = plan_profile(profiled()[1], budget=1.0)
    return replace(
        unplanned, policy=policy, budget_bytes=limit, predicted=replace(unplanned.predicted, peak_bytes=peak)
    )


@pytest.mark.parametrize(("more_bytes", "checks"), [(0, 1), (200, 1), (300, 2), (40_000, 2)])
def test_few_checks_find_the_plan_that_leaves_the_reserve_free(more_bytes, checks):
    """If every step takes so many bytes more than predicted; plans are 1,000 bytes apart."""
    limit = 10_000_000
    most, seen = limit - limit // checked.RESERVE, []

    def measure(policy):
        seen.append(policy.rules[0].min_bytes + more_bytes)
        return checked.Measured(seen[-1])

    plan = checked.checked(a_plan(limit, limit), measure, lambda aim: a_plan(aim, aim // 1000 * 1000))
    assert most - 2000 < plan.measured_bytes <= most
    assert plan.measured_bytes == seen[-1]
    assert len(seen) == checks
    assert plan.budget_bytes == limit


def test_a_plan_within_the_reserve_is_taken_where_nothing_smaller_fits():
    def nothing(aim):
        raise NothingFits(aim, a_plan(aim, aim).predicted, "the head", without_host=False, largest=None)

    plan = checked.checked(a_plan(10_000_000, 9_999_000), lambda policy: checked.Measured(9_999_500), nothing)
    assert plan.measured_bytes == 9_999_500
    assert plan.planned_for == plan.budget_bytes


def test_where_no_plan_keeps_the_budget_the_nearest_is_given_and_says_so(decoder, more):
    unplanned = planned(decoder, 1.0).unplanned.peak_bytes
    more(unplanned)
    plan = planned(decoder)
    assert plan.measured_bytes > plan.budget_bytes
    assert "above the budget" in str(plan)
    assert plan.predicted.peak_bytes <= plan_profile(decoder[1], budget=0.8, host=0).predicted.peak_bytes


def out_of_memory(monkeypatch, times):
    left = [None] * times

    def measure_under(*given, **named):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("no memory")
        return checked.measure_under(*given, **named)

    monkeypatch.setattr(make, "measure_under", measure_under)


def test_a_plan_whose_step_finds_no_memory_is_made_again_for_less(decoder, monkeypatch):
    first = planned(decoder)
    out_of_memory(monkeypatch, 1)
    plan = planned(decoder)
    assert plan.planned_for < plan.budget_bytes == first.budget_bytes
    assert plan.predicted.peak_bytes < first.predicted.peak_bytes
    assert plan.measured_bytes <= plan.planned_for


def test_a_step_that_nobody_has_seen_whole_is_run_before_it_is_said_to_fit(decoder, monkeypatch):
    """Measured with layers recomputed, it was predicted to fit; but the memory that is left is in pieces."""
    model, profile = decoder
    seen = replace(profile, recomputed_layers=4)
    plan = ps.plan(model, batch(), budget="1GiB", profile=seen, host=0)
    assert not plan.policy.rules
    assert plan.measured_bytes <= plan.budget_bytes
    out_of_memory(monkeypatch, 1)
    plan = ps.plan(model, batch(), budget="1GiB", profile=seen, host=0)
    assert plan.policy.rules
    assert plan.measured_bytes <= plan.planned_for < plan.budget_bytes


def test_where_no_plan_finds_memory_it_says_what_to_do(decoder, monkeypatch):
    out_of_memory(monkeypatch, 10)
    with pytest.raises(torch.OutOfMemoryError, match=r"further plans for less; give a smaller budget"):
        planned(decoder)


def test_a_keeper_with_a_budget_checks_its_plan(more):
    more(4096)
    torch.manual_seed(0)
    model = Decoder(preset("tiny", layers=4))
    model.initialise(0)
    plain = Decoder(preset("tiny", layers=4))
    plain.initialise(0)
    keeper = ps.Keeper(budget=0.6, repeats=1).attach(model)
    for _ in range(4):
        with keeper.step():
            sum(model(*batch())).backward()
        sum(plain(*batch())).backward()
    assert keeper.plan.measured_bytes <= keeper.plan.budget_bytes
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
