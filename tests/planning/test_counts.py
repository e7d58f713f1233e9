"""What the linear program proposes, and which layers take it: those of many layers, above all."""

from types import SimpleNamespace

import pytest
from test_plans import MB, made_up

from pagestash.planning import counts, improve, solve
from pagestash.planning.budget import parse_budget
from pagestash.planning.counts import FIRST_RATE, MANY_LEVELS, OTHER_RATES, PROBES, assigned
from pagestash.planning.improve import BLOCKS, predictions_for
from pagestash.planning.layers import Choice, Group, Unit
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Cost
from pagestash.planning.problem import CandidatePool, Problem
from pagestash.planning.solve import LEAST, candidates

KEEP: Choice = ()
MOVE: Choice = (("mlp", "offload", 1.0),)
RECOMPUTE: Choice = (("mlp", "recompute", 1.0),)


def group(layers):
    costs = [Cost(10, 0, 0.0, 0), Cost(0, 10, 0.0, 0), Cost(0, 0, 1.0, 10)]
    return Group([Unit(f"layers.{at}") for at in range(layers)], [KEEP, MOVE, RECOMPUTE], costs)


def test_of_a_few_layers_the_first_move_and_the_last_keep():
    found = assigned([group(6)], ((1, 2, 3),))
    assert found == (MOVE, MOVE, RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP)


@pytest.mark.parametrize("own", [(16, 32, 16), (1, 40, 23), (0, 63, 1), (64, 0, 0), (21, 22, 21)])
def test_spread_choices_have_their_share_of_every_part_of_the_layers(own):
    found = assigned([group(64)], (own,), spread=True)
    for choice, count in zip((KEEP, MOVE, RECOMPUTE), own):
        assert found.count(choice) == count
        for end in range(65):
            assert abs(found[:end].count(choice) - count * end / 64) <= 1.5


class Proposals:
    """Proposals that say what was asked of them."""

    def __init__(self, name):
        self.name = name

    def smallest(self):
        return self.name, "smallest"

    def at(self, part, rate, *, spread):
        assert spread
        return self.name, round(part * MANY_LEVELS), rate


class Pool:
    """Predictions of such assignments: at each probed level another rate is the fastest, and `b` before `a`."""

    def __init__(self):
        self.tried = []
        self.best = dict(zip(PROBES, OTHER_RATES))

    def known(self):
        return [(None, SimpleNamespace(mean_seconds=1.0, peak_bytes=100))]

    def predict_alone(self, assignment):
        name, level, rate = assignment
        self.tried.append(assignment)
        seconds = 2.0 + (name == "a") - 0.5 * (rate == self.best.get(level))
        return SimpleNamespace(mean_seconds=seconds, peak_bytes=50)

    def predict(self, assignment):
        self.tried.append(assignment)


def test_levels_are_solved_with_what_was_fastest_at_the_one_that_was_probed():
    pool = Pool()
    counts._probe(pool, [Proposals("a"), Proposals("b")])
    assert {("a", "smallest"), ("b", "smallest")} < set(pool.tried)
    for probe, levels in PROBES.items():
        for level in levels:
            rates = {item[2] for item in pool.tried if item[:2] == ("b", level)}
            if level == probe:
                assert rates == {FIRST_RATE, *OTHER_RATES}
                assert ("a", level, FIRST_RATE) in pool.tried
            else:
                assert rates == {pool.best[probe]}
    assert sorted(level for levels in PROBES.values() for level in levels) == list(range(MANY_LEVELS))


def test_where_a_host_has_no_memory_for_a_proposal_the_other_is_taken(monkeypatch):
    pool = Pool()
    alone = pool.predict_alone
    monkeypatch.setattr(pool, "predict_alone", lambda item: None if item[0] == "b" else alone(item))
    counts._probe(pool, [Proposals("a"), Proposals("b")])
    assert {item[0] for item in pool.tried[2:]} == {"a"}


def found_for(step, part):
    """The fastest candidate for a part of the bytes, in times of the step without a policy; and predictions."""
    predictor = Predictor(step)
    problem = Problem(step, 1 << 40, predictor=predictor)
    found = candidates(problem)
    unplanned = next(item.predicted for item in found if not item.rules)
    limit = parse_budget(part, unplanned, step.profile.device)
    best = next(item.predicted for item in found if item.predicted.peak_bytes <= limit)
    return best.seconds / unplanned.seconds, predictor.count


@pytest.mark.whole_search
@pytest.mark.parametrize(("part", "most"), [(0.75, 1.01), (0.5, 1.045), (0.3, 1.075)])
def test_plans_for_64_layers_are_as_fast_as_for_few_with_few_predictions(part, most):
    """Where the first layers moved and the last ones kept, the step took 1.03, 1.07 and 1.10 times as long."""
    seconds, count = found_for(MeasuredStep(made_up(64, (8 * MB, 2), (5 * MB, 6), link=5e8)), part)
    few, _ = found_for(MeasuredStep(made_up(8, (8 * MB, 2), (5 * MB, 6), link=5e8)), part)
    assert seconds <= most
    assert seconds <= 1.01 * few
    assert count <= 250


def test_of_many_layers_that_take_long_to_predict_only_counts_are_tried(monkeypatch):
    monkeypatch.setattr(improve, "MOST_OF_LAYERS", 100_000)
    monkeypatch.setattr(solve, "Search", None)
    step = MeasuredStep(made_up(64, (8 * MB, 2), (5 * MB, 6), link=5e8))
    assert predictions_for(step.count + len(step.profile.tensors), 64) < LEAST
    seconds, count = found_for(step, 0.5)
    assert seconds <= 1.045
    assert count <= 60


def test_layers_up_to_those_that_a_search_changes_one_by_one_are_not_probed(monkeypatch):
    monkeypatch.setattr(counts, "_probe", None)
    problem = Problem(MeasuredStep(made_up(BLOCKS, (8 * MB, 2), (5 * MB, 6), link=5e8)), 1 << 40)
    counts.predict_counts(problem, pool := CandidatePool(problem), few=True, least=False)
    assert pool.count > 3
