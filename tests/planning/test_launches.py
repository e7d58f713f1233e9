"""Plans where the host is ahead of the device: sums count its launches, and searches go by them."""

import re
from dataclasses import replace

import pytest
from test_graphed_plans import on_gpu
from test_lanes import COSTLY, launched

import pagestash as ps
from pagestash.planning.candidates import Problem
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable

RULES = {
    "recompute": [ps.Rule("layers.*.a", "recompute")],
    "offload": [ps.Rule("layers.{0-4}.b", "offload", prefetch_bytes=0)],
    "stash": [ps.Rule("layers.*.b", "stash")],
}
RULES["all"] = [*RULES["recompute"], *RULES["offload"]]


def ahead(part):
    """A step of a loop whose host takes this part of the device's time."""
    step = MeasuredStep(on_gpu(launched(part)), loops=True)
    assert step.ahead
    return step


def table(step, rules):
    return RuleTable.of(ps.Policy(rules), step.profile.regions)


@pytest.mark.parametrize("rules", RULES)
def test_sums_count_what_a_prediction_counts(rules):
    step = ahead(0.9)
    predictor = Predictor(step)
    cost, found = predictor.cost(table(step, RULES[rules])), predictor.predict(table(step, RULES[rules]))
    plain = predictor.predict(table(step, []))
    assert cost.launch_seconds == pytest.approx(found.launch_seconds - plain.launch_seconds)
    assert cost.device_seconds == pytest.approx(found.device_seconds - plain.device_seconds)
    assert cost.launch_seconds > 8 * min(COSTLY.put, COSTLY.record)


@pytest.mark.parametrize("part", [0.2, 0.8, 1.5])
def test_what_a_policy_takes_longer_follows_from_its_sums(part):
    """On a host that is always ahead, on one that the device waits for at times, and on one that it waits for."""
    step = ahead(part)
    predictor = Predictor(step)
    policies = [
        table(step, []),
        table(step, [ps.Rule("layers.{0-3}.a", "recompute")]),
        table(step, RULES["recompute"]),
    ]
    for one, other in ((0, 1), (1, 2), (0, 2), (2, 0)):
        before, after = (predictor.predict(policies[number]) for number in (one, other))
        more = predictor.cost(policies[other]).minus(predictor.cost(policies[one]))
        assert before.longer(more) == pytest.approx(after.mean_seconds - before.mean_seconds)


def test_a_busy_host_counts_before_the_choices_of_a_layer_are_combined():
    """`seconds` has what the step waits for the host on average, nothing where it never does."""
    quick, busy = (Predictor(ahead(part)).cost(table(ahead(part), RULES["all"])) for part in (0.2, 1.0))
    assert quick.seconds == quick.device_seconds
    assert busy.seconds > busy.device_seconds + 0.5 * busy.launch_seconds


def test_steps_that_wait_have_no_launches_of_their_own():
    step = MeasuredStep(replace(on_gpu(launched(0.9)), host_waits=True), loops=True)
    cost = Predictor(step).cost(table(step, RULES["all"]))
    assert cost.launch_seconds == 0
    assert cost.seconds > cost.device_seconds


def test_layers_that_are_alike_but_for_their_times_cost_the_device_as_much_more():
    step = ahead(0.9)
    slow = re.compile(r"layers[.][4-7]")
    regions = [
        replace(own, forward_seconds=5 * own.forward_seconds) if slow.match(own.name) else own
        for own in step.profile.regions
    ]
    step.profile = replace(step.profile, regions=regions)
    quick, slower = (group for group in Problem(step, 1 << 30).groups if len(group.units) == 4)
    assert any(cost.device_seconds for cost in quick.costs)
    for one, other in zip(quick.costs, slower.costs):
        assert other.device_seconds == pytest.approx(5 * one.device_seconds)
        assert other.seconds - one.seconds == pytest.approx(4 * one.device_seconds)
        assert other.launch_seconds == one.launch_seconds
