"""Mixes of choices, and which layers take them: those of many layers, above all."""

import pytest
from support.tiers import slow
from test_plans import MB, made_up

from pagestash.planning.budget import parse_budget
from pagestash.planning.candidates import Problem
from pagestash.planning.choices import Choice, Group, Unit
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.mixes import Point, front_of, mixes
from pagestash.planning.predict import Predictor
from pagestash.planning.search import BLOCKS, predictions_for

KEEP: Choice = ()
MOVE: Choice = (("mlp", "offload", 1.0),)
RECOMPUTE: Choice = (("mlp", "recompute", 1.0),)


def group(layers):
    return Group([Unit(f"layers.{at}") for at in range(layers)])


def test_a_front_has_the_choices_whose_bytes_cost_least_time():
    keep, cheap, dear, small = (Point(*own, KEEP) for own in ((1.0, 90), (1.1, 80), (1.6, 70), (1.8, 50)))
    slower, larger = Point(1.2, 90, KEEP), Point(1.9, 60, KEEP)
    assert front_of([small, slower, dear, keep, larger, cheap]) == [keep, cheap, small]
    assert front_of([slower]) == [slower]


def test_a_choice_that_is_faster_than_keeping_and_smaller_comes_first():
    keep, move = Point(1.0, 90, KEEP), Point(0.9, 80, MOVE)
    assert front_of([keep, move]) == [move]


def test_groups_go_down_their_fronts_the_cheapest_bytes_first():
    few = [Point(1.0, 90, KEEP), Point(1.2, 80, MOVE), Point(2.0, 70, RECOMPUTE)]
    one = [Point(1.0, 90, KEEP), Point(1.3, 80, MOVE)]
    found = list(mixes([group(2), group(1)], [few, one], spread=True))
    assert found == [
        (KEEP, KEEP, KEEP),
        (MOVE, KEEP, KEEP),
        (MOVE, MOVE, KEEP),
        (MOVE, MOVE, MOVE),
        (RECOMPUTE, MOVE, MOVE),
        (RECOMPUTE, RECOMPUTE, MOVE),
    ]


@pytest.mark.parametrize("count", [9, 20, 64])
def test_of_many_layers_a_choice_has_its_share_of_every_part(count):
    """Copies of neighbours would come at once."""
    for found in mixes([group(count)], [[Point(1.0, 90, KEEP), Point(1.2, 80, MOVE)]], spread=True):
        for end in range(count + 1):
            assert abs(found[:end].count(MOVE) - found.count(MOVE) * end / count) <= 1.5


def found_for(step, part):
    """The fastest candidate for a part of the bytes, in times of the step without a policy; and predictions."""
    predictor = Predictor(step)
    found = Problem(step, 1 << 40, predictor=predictor).candidates()
    unplanned = next(item.predicted for item in found if not item.rules)
    limit = parse_budget(part, unplanned, step.profile.device)
    best = next(item.predicted for item in found if item.predicted.peak_bytes <= limit)
    return best.seconds / unplanned.seconds, predictor.count


def layers(count):
    return MeasuredStep(made_up(count, (8 * MB, 2), (5 * MB, 6), link=5e8))


@pytest.mark.whole_search
@pytest.mark.parametrize(("part", "most"), [(0.5, 1.045), *slow((0.75, 1.015), (0.3, 1.075))])
def test_plans_for_64_layers_are_as_fast_as_for_few_with_few_predictions(part, most):
    """Where the first layers moved and the last ones kept, the step took 1.03, 1.07 and 1.10 times as long."""
    seconds, count = found_for(layers(64), part)
    few, _ = found_for(layers(BLOCKS), part)
    assert seconds <= most
    assert seconds <= 1.015 * few
    assert count <= 260


@pytest.mark.whole_search
def test_only_large_groups_have_fewer_predictions_than_their_layers_are_worth():
    assert predictions_for(100, 20, BLOCKS) == predictions_for(100, 20, 1) == 18_000 // 20
    assert predictions_for(100, 64, 64) < predictions_for(100, 64, BLOCKS) == 18_000 // 64
