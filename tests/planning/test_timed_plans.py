"""Steps decide between a plan and one that is made as if a keeper cost the host nothing."""

from dataclasses import replace

import pytest
import torch
from support.tiers import slow
from test_plans import MB, MS, made_up

from pagestash.planning import plan_profile
from pagestash.planning.checked import Measured
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.make import plan_step
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable
from pagestash.planning.timed import CLOSE
from pagestash.profiling.overhead import Overhead

COST = Overhead(
    pack=0.05 * MS, unpack=0.05 * MS, record=0.6 * MS, replay=0.6 * MS, put=0.3 * MS, get=0.3 * MS
)


def profiled():
    return made_up(8, (8 * MB, 0.3), (5 * MB, 1), link=2e9)


def predicted(step, policy):
    return Predictor(step).predict(RuleTable.of(policy, step.profile.regions))


@pytest.fixture
def step():
    """Its host is half as busy as its device."""
    profile = profiled()
    segments = [replace(segment, host_seconds=0.5 * segment.seconds) for segment in profile.segments]
    return MeasuredStep(replace(profile, segments=segments, overhead=COST))


def planned(step, measure=None):
    return plan_step(step, budget=0.45, host="1GiB", measure=measure)


@pytest.fixture
def plans(step):
    """The plan, and its rival for a host to which a keeper costs nothing."""
    found = planned(step), planned(step.with_overhead(Overhead()))
    assert found[0].policy != found[1].policy
    return found


@pytest.mark.parametrize("faster", [0.05, CLOSE / 4])
def test_a_plan_as_if_a_keeper_cost_nothing_is_taken_if_it_is_faster(step, plans, faster):
    aware, free = plans
    ran = []

    def measure(policy):
        ran.append(policy)
        seconds = aware.predicted.seconds * (1 - faster if policy == free.policy else 1)
        return Measured(predicted(step, policy).peak_bytes, seconds)

    plan = planned(step, measure)
    taken = free if faster > CLOSE else aware
    assert (plan.policy, plan.measured_bytes) == (taken.policy, taken.predicted.peak_bytes)
    assert plan.predicted == predicted(step, taken.policy)  # with what a keeper costs
    assert ran == 2 * [aware.policy, free.policy]


@pytest.mark.parametrize("slow_round", [1, *slow(0, 2, 3)])
def test_a_slow_moment_of_the_host_is_no_property_of_a_plan(step, plans, slow_round):
    """In one of all rounds everything takes half as long again."""
    rounds = []

    def measure(policy):
        rounds.append(policy)
        longer = 1.5 if len(rounds) - 1 == slow_round else 1.0
        return Measured(0, longer * predicted(step, policy).seconds)

    plan = planned(step, measure)
    assert len(rounds) == 4
    assert plan.policy == min(plans, key=lambda own: predicted(step, own.policy).seconds).policy
    assert plan.measured_seconds == predicted(step, plan.policy).seconds


@pytest.mark.parametrize("when", [*slow(1), 2])
@pytest.mark.parametrize("what", ["too large", "no memory"])
def test_a_faster_rival_that_exceeds_the_budget_in_any_round_is_not_taken(step, plans, when, what):
    aware, free = plans
    ran = []

    def measure(policy):
        ran.append(policy)
        if policy == aware.policy:
            return Measured(0, aware.predicted.seconds)
        if ran.count(free.policy) >= when or policy != free.policy:
            if what == "no memory":
                raise torch.OutOfMemoryError("no memory")
            return Measured(2**40, 0.5 * aware.predicted.seconds)
        return Measured(0, 0.5 * aware.predicted.seconds)

    assert planned(step, measure).policy == aware.policy


def test_a_rival_that_keeps_the_budget_is_taken_where_the_plan_does_not(step, plans):
    aware, free = plans

    def measure(policy):
        slower = 2.0 if policy == free.policy else 1.0
        return Measured(0 if policy == free.policy else 2**40, slower * aware.predicted.seconds)

    assert planned(step, measure).policy == free.policy


def test_without_a_host_lane_there_is_no_rival():
    plain = MeasuredStep(profiled())
    ran = []

    def measure(policy):
        ran.append(policy)
        return Measured(0, 1.0)

    found = planned(plain, measure)
    assert found.predicted == plan_profile(plain.profile, budget=0.45, host="1GiB").predicted
    assert len(ran) == 1
