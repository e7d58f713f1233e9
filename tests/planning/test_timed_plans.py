"""A plan's time is checked by steps: what a keeper costs the host is fitted to them."""

import re
from dataclasses import replace

import pytest
import torch
from test_plans import MB, MS, made_up

from pagestash.planning import plan_profile
from pagestash.planning.checked import Measured
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.make import plan_step
from pagestash.planning.timed import CLOSE, _predict
from pagestash.policy import Policy
from pagestash.profiling.overhead import Overhead

COST = Overhead(
    pack=0.05 * MS, unpack=0.05 * MS, record=0.6 * MS, replay=0.6 * MS, put=0.3 * MS, get=0.3 * MS
)


def profiled():
    return made_up(8, (8 * MB, 0.3), (5 * MB, 1), link=2e9)


@pytest.fixture
def step():
    """Its host is half as busy as its device."""
    profile = profiled()
    segments = [replace(segment, host_seconds=0.5 * segment.seconds) for segment in profile.segments]
    return MeasuredStep(replace(profile, segments=segments, overhead=COST))


class Machine:
    """Runs steps, on which a keeper costs the host so many times what was measured."""

    def __init__(self, step, factor=1.0, longer=1.0):
        self.step, self.longer = step.with_overhead(step.overhead.scaled(factor)), longer
        self.ran = []

    def __call__(self, policy):
        self.ran.append(policy)
        found = _predict(self.step, policy)
        return Measured(found.peak_bytes, self.longer * found.seconds)


def planned(step, machine, budget=0.6):
    return plan_step(step, budget=budget, host="1GiB", measure=machine)


def as_if_free(step, budget=0.6):
    """The plan for a host to which a keeper costs nothing."""
    return plan_step(step.with_overhead(Overhead()), budget=budget, host="1GiB")


def tried(machine):
    return list({str(policy): policy for policy in machine.ran}.values())


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("budget", [0.75, 0.5])
def test_the_prediction_is_fitted_to_steps_on_a_slower_or_faster_host(step, factor, budget):
    machine = Machine(step, factor)
    plan = planned(step, machine, budget)
    assert plan.measured_seconds == machine(plan.policy).seconds
    assert plan.predicted.seconds == pytest.approx(plan.measured_seconds, rel=CLOSE)


@pytest.mark.whole_search
@pytest.mark.parametrize("budget", [0.75, 0.5])
def test_on_a_slower_host_the_plan_is_as_fast_as_one_that_knew(step, budget):
    machine = Machine(step, 2.5)
    informed = plan_step(machine.step, budget=budget, host="1GiB")
    unaware = plan_step(step, budget=budget, host="1GiB")
    plan = planned(step, machine, budget)
    # (A prediction that is close is not fitted, and the plan is made for the average of quick and slow hosts.)
    assert plan.measured_seconds == pytest.approx(informed.predicted.seconds, rel=2 * CLOSE)
    # Plans are compared by that average, too.
    average = [_predict(machine.step, own.policy).mean_seconds for own in (plan, unaware)]
    assert average[0] <= average[1]


def test_a_slower_host_makes_for_another_plan(step):
    """Else the tests above show nothing."""
    machine = Machine(step, 3.5)
    unaware, plan = plan_step(step, budget=0.5, host="1GiB"), planned(step, machine, 0.5)
    assert plan.policy != unaware.policy
    assert plan.measured_seconds < 0.98 * machine(unaware.policy).seconds
    assert "times what it does in small regions" in str(plan)


def test_a_prediction_that_is_close_is_left_alone(step):
    machine = Machine(step, longer=1 + CLOSE / 2)
    plan = planned(step, machine)
    assert tried(machine) == [plan.policy, as_if_free(step).policy]
    assert plan.predicted == plan_step(step, budget=0.6, host="1GiB").predicted
    assert plan.measured_seconds == pytest.approx((1 + CLOSE / 2) * plan.predicted.seconds)
    assert "small regions" not in str(plan)
    assert f"{1e3 * plan.measured_seconds:.2f} ms" in str(plan)


@pytest.mark.parametrize("longer", [0.1, 10.0])
def test_a_time_that_no_host_explains_leaves_the_prediction_as_it_is(step, longer):
    machine = Machine(step, longer=longer)
    plan = planned(step, machine)
    assert tried(machine) == [plan.policy, Policy(), as_if_free(step).policy]
    assert plan.predicted == plan_step(step, budget=0.6, host="1GiB").predicted


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drift", [0.93, 1.0, 1.08])
def test_a_device_that_is_slower_than_in_the_profile_is_slower_in_predictions(step, drift, ahead):
    """It is found by steps without a policy, and only if the plan's own are not as predicted."""
    if ahead:
        step = MeasuredStep(replace(step.profile, device="cuda:0"), loops=True)
    before = plan_step(step, budget=0.6, host="1GiB")
    machine = Machine(step, longer=drift)
    plan = planned(step, machine)
    assert (Policy() in machine.ran) == (drift != 1.0)
    assert plan.predicted.seconds == pytest.approx(plan.measured_seconds, rel=CLOSE)
    assert plan.unplanned.seconds == pytest.approx(drift * before.unplanned.seconds)
    assert (f"took {drift:.3f} times what it took in the profile" in str(plan)) == (drift != 1.0)


@pytest.mark.parametrize("unplanned", [1.0, 1.004])
def test_what_only_a_plan_is_slower_by_is_no_property_of_the_device(step, unplanned):
    """Steps without a policy take what they took in the profile, or nearly."""
    first = plan_step(step, budget=0.6, host="1GiB")

    def measure(policy):
        found = _predict(step, policy)
        return Measured(found.peak_bytes, found.seconds * (5.0 if policy.rules else unplanned))

    plan = planned(step, measure)
    assert plan.unplanned == first.unplanned
    assert plan.predicted == first.predicted


def test_a_step_without_a_policy_that_finds_no_memory_tells_nothing(step):
    machine = Machine(step, longer=1.1)

    def measure(policy):
        if not policy.rules:
            raise torch.OutOfMemoryError("no memory")
        return machine(policy)

    plan = planned(step, measure)
    assert plan.unplanned == plan_step(step, budget=0.6, host="1GiB").unplanned


@pytest.mark.parametrize("faster", [0.05, CLOSE / 4])
def test_a_plan_as_if_a_keeper_cost_nothing_is_taken_if_it_is_faster(step, faster):
    """Though the first one takes what was predicted of it. If it is as fast, the first one stays."""
    aware, free = plan_step(step, budget=0.6, host="1GiB"), as_if_free(step)
    assert aware.policy != free.policy
    ran = []

    def measure(policy):
        ran.append(policy)
        seconds = aware.predicted.seconds * (1 - faster if policy == free.policy else 1)
        return Measured(_predict(step, policy).peak_bytes, seconds)

    plan = planned(step, measure)
    taken = free if faster > CLOSE else aware
    assert (plan.policy, plan.measured_bytes) == (taken.policy, taken.predicted.peak_bytes)
    assert min(ran.count(aware.policy), ran.count(free.policy)) > 1  # between the two it was decided in turn


def test_a_plan_that_exceeds_the_budget_in_a_second_round_is_not_taken(step):
    aware, free = plan_step(step, budget=0.6, host="1GiB"), as_if_free(step)
    ran = []

    def measure(policy):
        ran.append(policy)
        over = ran.count(free.policy) > 1
        seconds = aware.predicted.seconds * (0.95 if policy == free.policy else 1)
        return Measured(2**40 if over and policy == free.policy else 0, seconds)

    assert planned(step, measure).policy == aware.policy
    assert ran.count(free.policy) == 2


def test_a_plan_that_finds_no_memory_in_a_second_round_is_not_taken(step):
    aware, free = plan_step(step, budget=0.6, host="1GiB"), as_if_free(step)
    ran = []

    def measure(policy):
        ran.append(policy)
        if ran.count(free.policy) > 1 and policy == free.policy:
            raise torch.OutOfMemoryError("no memory")
        return Measured(0, aware.predicted.seconds * (0.95 if policy == free.policy else 1))

    assert planned(step, measure).policy == aware.policy
    assert ran.count(free.policy) == 2


@pytest.mark.parametrize("factor", [0.7, 1.45])
def test_limit_and_curve_of_a_fitted_plan_know_of_plans_above_the_budget(step, factor):
    machine = Machine(step, factor)
    plan, alone = planned(step, machine, 0.5), plan_step(machine.step, budget=0.5, host="1GiB")
    assert re.fullmatch(r"(memory|the link): with \d.* more, .* less", plan.limit)
    assert plan.curve[0][0] > plan.budget_bytes > plan.curve[-1][0]
    assert plan.curve[0][1] == pytest.approx(alone.curve[0][1], rel=0.02)


def test_limit_and_curve_of_a_plan_as_if_free_are_of_the_step_as_it_is(step):
    aware, free = plan_step(step, budget=0.6, host="1GiB"), as_if_free(step)

    def measure(policy):
        return Measured(0, aware.predicted.seconds * (0.95 if policy == free.policy else 1))

    plan = planned(step, measure)
    assert plan.policy == free.policy
    at = dict(free.curve)
    both = [(at[peak], seconds) for peak, seconds in plan.curve if peak in at]
    assert all(seconds >= before for before, seconds in both)
    assert any(seconds > 1.001 * before for before, seconds in both)  # a keeper's cost is in it


def test_the_fastest_of_the_plans_that_were_tried_is_taken(step):
    """Whatever is fitted: here each further plan is slower than the one before."""
    ran = []

    def measure(policy):
        found = _predict(step, policy)
        if policy not in ran:
            ran.append(policy)
        return Measured(found.peak_bytes, (1.05 + 0.1 * len(ran)) * found.seconds)

    plan = planned(step, measure)
    assert 1 < len(ran) <= 3  # as measured, as if free, and fitted
    assert plan.policy == ran[0]


@pytest.mark.parametrize("slow_round", [0, 1, 2, 3])
def test_a_slow_moment_of_the_host_is_no_property_of_a_plan(step, slow_round):
    """In one of all rounds everything takes a tenth more."""
    rounds = []

    def measure(policy):
        found = _predict(step, policy)
        rounds.append(policy)
        slow = len(rounds) - 1 == slow_round
        return Measured(found.peak_bytes, (1.1 if slow else 1.0) * found.seconds)

    plan = planned(step, measure)
    alone = plan_step(step, budget=0.6, host="1GiB")
    assert len(rounds) > slow_round
    assert (plan.policy, plan.predicted) == (alone.policy, alone.predicted)
    assert plan.measured_seconds == plan.predicted.seconds


def test_a_further_plan_that_exceeds_the_budget_is_not_taken_for_its_speed(step):
    ran = []

    def measure(policy):
        found = _predict(step, policy)
        ran.append(policy)
        first = policy == ran[0]
        return Measured(found.peak_bytes if first else 2**40, (1.2 if first else 0.5) * found.seconds)

    plan = planned(step, measure)
    assert len(ran) > 1
    assert plan.policy == ran[0]


def test_where_further_plans_find_no_memory_the_first_is_taken(step):
    machine, ran = Machine(step, 2.5), []

    def measure(policy):
        ran.append(policy)
        if policy != ran[0]:
            raise torch.OutOfMemoryError("no memory")
        return machine(policy)

    plan = planned(step, measure, 0.5)
    assert len(ran) > 1
    assert plan.policy == ran[0]
    assert plan.predicted.seconds == pytest.approx(plan.measured_seconds, rel=CLOSE)


def test_where_all_plans_exceed_the_budget_the_nearest_is_taken_though_others_are_faster(step):
    machine, ran = Machine(step, 2.5), {}

    def measure(policy):
        found = machine(policy)
        ran.setdefault(str(policy), Measured(2**30 + len(ran), found.seconds / (1 + 0.01 * len(ran))))
        return ran[str(policy)]

    plan = planned(step, measure, 0.5)
    first = next(iter(ran.values()))
    assert len(ran) > 1
    assert min(found.seconds for found in ran.values()) < first.seconds
    assert plan.measured_bytes == first.peak_bytes


@pytest.mark.parametrize("longer", [1.0, 0.2])
def test_a_further_plan_that_needs_no_factor_is_predicted_without(step, longer):
    """Its time is close to the prediction without a factor, or none explains it."""
    slow, ran = Machine(step, 2.5), []

    def measure(policy):
        ran.append(policy)
        return slow(policy) if policy == ran[0] else Measured(0, longer * _predict(step, policy).seconds)

    plan = planned(step, measure, 0.5)
    assert plan.policy != ran[0]
    assert plan.predicted == _predict(step, plan.policy)
    assert "small regions" not in str(plan)


def test_without_a_host_lane_times_say_nothing_of_a_keeper(step):
    plain = MeasuredStep(profiled())
    machine = Machine(plain, longer=1.3)
    assert planned(plain, machine).predicted == plan_profile(plain.profile, budget=0.6, host="1GiB").predicted
    assert len(machine.ran) == 1
