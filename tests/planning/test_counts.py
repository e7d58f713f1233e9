"""What the linear program proposes, and which layers take it: those of many layers, above all."""

import sys
from types import SimpleNamespace

import pytest
from test_plans import MB, made_up

from pagestash.planning import counts, improve, solve
from pagestash.planning.budget import parse_budget
from pagestash.planning.counts import FIRST_RATE, OTHER_RATES, PROBED_GRID, PROBES, assigned
from pagestash.planning.improve import BLOCKS, predictions_for
from pagestash.planning.layers import Choice, Group, Unit
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Cost
from pagestash.planning.problem import Problem
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


def test_a_small_group_beside_is_not_spread():
    found = assigned([group(64), group(BLOCKS)], ((32, 32, 0), (4, 4, 0)), spread=True)
    assert found[:4] == (MOVE, KEEP, MOVE, KEEP)
    assert found[64:] == 4 * (MOVE,) + 4 * (KEEP,)


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

    def spread(self, level, rate):
        return self.name, level, rate


def prediction(seconds, peak):
    return None, SimpleNamespace(mean_seconds=seconds, peak_bytes=peak)


@pytest.mark.parametrize(
    ("found", "price"),
    [
        ([], 0.0),
        ([(2.0, 100)], 0.0),  # frees nothing
        ([(2.0, 60)], 0.025),
        ([(1.1, 90), (2.0, 60), (5.0, 20)], 0.025),  # the first one frees too little to tell
        ([(0.9, 60)], 0.0),
    ],
)
def test_a_byte_costs_what_the_cheapest_takes_that_frees_much(found, price):
    pool = SimpleNamespace(known=lambda: [prediction(1.0, 100), *(prediction(*own) for own in found)])
    assert counts._price(pool) == pytest.approx(price)


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
    for probe, levels in PROBES.items():
        for level in levels:
            rates = {item[2] for item in pool.tried if item[:2] == ("b", level)}
            if level == probe:
                assert rates == {FIRST_RATE, *OTHER_RATES}
                assert ("a", level, FIRST_RATE) in pool.tried
            else:
                assert rates == {pool.best[probe]}
    assert sorted(level for levels in PROBES.values() for level in levels) == list(range(PROBED_GRID))


def test_where_a_host_has_no_memory_for_a_proposal_the_other_is_taken(monkeypatch):
    pool = Pool()
    alone = pool.predict_alone
    monkeypatch.setattr(pool, "predict_alone", lambda item: None if item[0] == "b" else alone(item))
    counts._probe(pool, [Proposals("a"), Proposals("b")])
    assert {item[0] for item in pool.tried} == {"a"}


def test_of_two_proposals_that_are_as_fast_the_smaller_one_is_taken():
    class Sized(Pool):
        def known(self):
            return [prediction(1.0, 100), prediction(3.0, 20)]

        def predict_alone(self, assignment):
            self.tried.append(assignment)
            return SimpleNamespace(mean_seconds=2.0, peak_bytes=50 - (assignment[0] == "b"))

    pool = Sized()
    counts._probe(pool, [Proposals("a"), Proposals("b")])
    assert {item[0] for item in pool.tried if item[1] not in PROBES} == {"b"}


def found_for(step, part, host=1 << 40):
    """The fastest candidate for a part of the bytes, in times of the step without a policy; and predictions."""
    predictor = Predictor(step)
    found = candidates(problem := Problem(step, host, predictor=predictor))
    unplanned = next(item.predicted for item in found if not item.rules)
    limit = parse_budget(part, unplanned, step.profile.device)
    best = next(item.predicted for item in found if item.predicted.peak_bytes <= limit)
    assert problem.exact == ("scipy.optimize" not in sys.modules or sys.modules["scipy.optimize"] is not None)
    return best.seconds / unplanned.seconds, predictor.count


def layers(count):
    return MeasuredStep(made_up(count, (8 * MB, 2), (5 * MB, 6), link=5e8))


@pytest.mark.whole_search
@pytest.mark.parametrize(("part", "most"), [(0.75, 1.01), (0.5, 1.045), (0.3, 1.075)])
def test_plans_for_64_layers_are_as_fast_as_for_few_with_few_predictions(part, most):
    """Where the first layers moved and the last ones kept, the step took 1.03, 1.07 and 1.10 times as long."""
    seconds, count = found_for(layers(64), part)
    few, _ = found_for(layers(BLOCKS), part)
    assert seconds <= most
    assert seconds <= 1.01 * few
    assert count <= 260


@pytest.fixture
def no_search(monkeypatch):
    """Many layers are worth fewer predictions than a search takes."""
    monkeypatch.setattr(improve, "MOST_OF_ALIKE", 100_000)
    assert predictions_for(0, 1, 64) < LEAST


def test_of_many_layers_that_take_long_to_predict_only_counts_are_tried(no_search, monkeypatch):
    monkeypatch.setattr(solve, "Search", None)
    seconds, count = found_for(layers(64), 0.5)
    assert seconds <= 1.045
    assert count <= 70


def test_without_a_solver_a_search_is_tried_beside_the_greedy_counts(no_search, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    searched = []
    monkeypatch.setattr(solve, "_improve", lambda *given: searched.append(given))
    seconds, _ = found_for(layers(24), 0.5)
    assert searched
    assert 1.0 < seconds < 1.1


def test_many_layers_are_mixed_also_with_few_predictions(no_search, monkeypatch):
    mixed = []
    monkeypatch.setattr(counts, "with_mixes", lambda group: mixed.append(group) or group)
    found_for(layers(64), 0.5)
    assert mixed


@pytest.mark.parametrize(("count", "host"), [(BLOCKS, 1 << 40), (64, 0)])
def test_a_few_layers_or_those_without_host_memory_are_not_probed(monkeypatch, count, host):
    monkeypatch.setattr(counts, "_probe", None)
    monkeypatch.setattr(solve, "FEW", 2000)
    monkeypatch.setattr(counts, "with_mixes", None)  # as before: not with few predictions
    seconds, _ = found_for(layers(count), 0.5, host)
    assert 1.0 < seconds < 1.1


@pytest.mark.whole_search
def test_only_large_groups_have_fewer_predictions_than_their_layers_are_worth():
    assert predictions_for(100, 20, BLOCKS) == predictions_for(100, 20, 1) == 18_000 // 20
    assert predictions_for(100, 64, 64) < predictions_for(100, 64, BLOCKS) == 18_000 // 64
