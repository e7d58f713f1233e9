"""The search for better candidates, by what it is told about assignments."""

from typing import NamedTuple

import pytest

from pagestash.planning.improve import APART, BLOCKS, Search
from pagestash.planning.layers import Choice, Group, Unit, with_mixes
from pagestash.planning.prediction import Cost

RECOMPUTE: Choice = (("mlp", "recompute", 1.0),)
MOVE: Choice = (("mlp", "offload", 1.0),)
OTHER: Choice = (("attention", "offload", 1.0),)


class Found(NamedTuple):
    seconds: float
    peak_bytes: int
    is_waiting: bool = False


class Pool:
    """Units that move: each costs a second and frees a byte of 100, and `all_at_once` is what all of them cost."""

    def __init__(self, begun, all_at_once):
        self.all_at_once, self.found = all_at_once, {}
        for assignment in begun:
            self.predict(assignment)

    def predict(self, assignment):
        moving = sum(set(MOVE) <= set(choice) for choice in assignment)
        beside = sum(set(OTHER) <= set(choice) for choice in assignment)
        seconds = self.all_at_once if moving == len(assignment) else 5.0 + moving
        self.found[assignment] = Found(seconds + 10 * beside, 100 - moving)
        return self.found[assignment]

    def known(self):
        return list(self.found.items())

    @property
    def count(self):
        return len(self.found)


def searched(pool, count):
    group = Group([Unit(f"layers.{at}") for at in range(count)], steps=[MOVE, OTHER])
    group.cost = lambda choice: Cost(10 - len(choice), len(choice), 0.0, 0)
    Search([group], pool, byte_seconds=0.01).run([50], 200)
    return min(pool.known(), key=lambda item: item[1])[0]


@pytest.mark.parametrize("count", [3, BLOCKS, 3 * BLOCKS])
@pytest.mark.parametrize("have", [0, 1])
def test_all_layers_of_a_group_take_a_home_where_only_all_of_them_are_faster(count, have):
    begun = (MOVE,) * have + ((),) * (count - have)
    assert searched(Pool([begun], all_at_once=1.0), count) == (MOVE,) * count


@pytest.mark.parametrize("count", [3, BLOCKS, 3 * BLOCKS])
def test_all_layers_of_a_group_lose_a_home_where_only_all_of_them_are_faster(count):
    class Reversed(Pool):
        def predict(self, assignment):
            moving = sum(set(MOVE) <= set(choice) for choice in assignment)
            beside = sum(set(OTHER) <= set(choice) for choice in assignment)
            seconds = 1.0 if not moving else 5.0 + len(assignment) - moving
            self.found[assignment] = Found(seconds + 10 * beside, 90)
            return self.found[assignment]

    assert searched(Reversed([(MOVE,) * count], all_at_once=0.0), count) == ((),) * count


@pytest.mark.parametrize(("is_waiting", "wanted"), [(True, RECOMPUTE), (False, OTHER)])
def test_where_compute_waits_for_copies_what_moves_less_is_tried_first(is_waiting, wanted):
    """Where all copies hide, a byte less is worth little: what costs few seconds comes first."""
    group = Group([Unit(f"layers.{at}") for at in range(4)], steps=[MOVE, RECOMPUTE, OTHER])
    costs = {(): Cost(10, 0, 0.0, 0), MOVE: Cost(0, 10, 0.0, 0), RECOMPUTE: Cost(0, 0, 0.2, 0)}
    group.cost = lambda choice: costs.get(choice, Cost(0, 10, 0.05, 0))  # with `OTHER` beside it
    search = Search([group], Pool([(MOVE,) * 4], all_at_once=1.0), byte_seconds=0.1)
    first = search._likeliest((MOVE,) * 4, Found(5.0, 50, is_waiting), level=50, price=1.0)[0]
    assert set(wanted) <= set(first.choices[0])


def test_what_differs_from_the_best_may_lead_further():
    """No change of what is best makes it better; the second best becomes the best, a layer at a time."""
    wide: Choice = tuple((f"region{at}", "offload", 1.0) for at in range(APART))

    class Trap(Pool):
        def predict(self, assignment):
            apart = sum(set(wide) <= set(choice) for choice in assignment)
            beside = sum(set(OTHER) <= set(choice) for choice in assignment)
            seconds = 6.0 - beside if apart == len(assignment) else 5.0 + apart + beside
            self.found[assignment] = Found(seconds, 90)
            return self.found[assignment]

    best = searched(Trap([((),) * 4, (wide,) * 4], all_at_once=0.0), 4)
    assert best == (tuple(sorted({*wide, *OTHER})),) * 4


class Halves(Pool):
    """Fast if the first half moves and the last recomputes; each change of a few layers makes either worse."""

    def predict(self, assignment):
        half = len(assignment) // 2
        first, last = assignment[:half], assignment[half:]
        is_first, is_last = set(first) == {MOVE}, set(last) == {RECOMPUTE}
        seconds = {0: 20.0, 1: 10.0, 2: 1.0}[is_first + is_last]
        self.found[assignment] = Found(seconds, 90)
        return self.found[assignment]


@pytest.mark.parametrize("count", [2, 8, 9])
def test_the_first_layers_of_one_candidate_are_joined_to_the_last_of_another(count):
    half = count // 2
    one = (MOVE,) * count
    other = ((),) * half + (RECOMPUTE,) * (count - half)
    pool = Halves([((),) * count, one, other], all_at_once=0.0)
    group = Group([Unit(f"layers.{at}") for at in range(count)])
    group.cost = lambda choice: Cost(10 - len(choice), 0, 0.0, 0)
    Search([group], pool, byte_seconds=0.01).cross([80], 2 * count * count)
    assert min(pool.known(), key=lambda item: item[1])[0] == (MOVE,) * half + (RECOMPUTE,) * (count - half)


def test_the_sums_of_what_is_joined_are_those_of_its_layers():
    layers, others = (Group([Unit(f"{name}.{at}") for at in range(3)]) for name in ("layers", "others"))
    layers.cost = lambda choice: Cost(10 - len(choice), 3 * len(choice), 0.5 * len(choice), 0)
    others.cost = lambda choice: Cost(70 - 5 * len(choice), 0, 0.25 * len(choice), 0)
    one, other = (MOVE, (), MOVE, (), RECOMPUTE, MOVE), ((), (), RECOMPUTE, MOVE, (), MOVE)
    search = Search([layers, others], Pool([one, other], all_at_once=1.0), byte_seconds=0.01)

    def total(assignment):
        costs = [layers.cost(choice) for choice in assignment[:3]]
        return Cost(*map(sum, zip(*costs, *map(others.cost, assignment[3:]))))

    crossed = list(search._crossed(one, other))
    for child, more in crossed:
        assert more == total(child).minus(total(one))
    wanted = {(*a[:at], *b[at:]) for a, b in ((one, other), (other, one)) for at in range(1, 6)}
    assert {child for child, _ in crossed} | {one, other} == wanted | {one, other}


def test_what_is_best_is_crossed_with_what_is_best_at_a_level_beside_it():
    """At a level of 89 what keeps is best, and then its likes; what is best at 75 is not among them."""
    keeps = [(OTHER,) * at + ((),) * (4 - at) for at in range(5)]

    class Levels(Pool):
        def predict(self, assignment):
            moving = sum(choice == MOVE for choice in assignment)
            beside = sum(choice == OTHER for choice in assignment)
            self.found[assignment] = Found(5.0 + 0.1 * beside + 10 * moving, 90 - 4 * moving)
            return self.found[assignment]

    group = Group([Unit(f"layers.{at}") for at in range(4)])
    group.cost = lambda choice: Cost(10 - len(choice), 0, 0.0, 0)
    pool = Levels([*keeps, (MOVE,) * 4], all_at_once=0.0)
    Search([group], pool, byte_seconds=0.01)._cross([89, 75], 0, 4.0, 100)
    assert (MOVE, (), (), ()) in pool.found or ((), (), (), MOVE) in pool.found


@pytest.mark.parametrize("most", [0, 1, 5])
def test_candidates_are_crossed_with_so_many_predictions(most):
    begun = [((),) * 8, (MOVE,) * 8, (RECOMPUTE,) * 8]
    pool = Pool(begun, all_at_once=1.0)
    group = Group([Unit(f"layers.{at}") for at in range(8)])
    group.cost = lambda choice: Cost(10 - len(choice), 0, 0.0, 0)
    Search([group], pool, byte_seconds=0.01).cross([95, 90], most)
    assert pool.count == len(begun) + most


def test_mixes_are_choices_of_the_program_unless_another_beats_them():
    group = Group(
        [Unit("layers.0")], choices=[(), RECOMPUTE], costs=[Cost(10, 0, 0.0, 0), Cost(4, 0, 1.0, 0)]
    )
    both: Choice = tuple(sorted((*OTHER, *RECOMPUTE)))
    group.mixes = {both: Cost(2, 2, 1.0, 0), OTHER: Cost(8, 9, 0.0, 0), MOVE: Cost(8, 9, 0.5, 0)}
    found = with_mixes(group)
    assert found.choices == [(), OTHER, RECOMPUTE, both]
    assert found.costs == [Cost(10, 0, 0.0, 0), Cost(8, 9, 0.0, 0), Cost(4, 0, 1.0, 0), Cost(2, 2, 1.0, 0)]
    assert group.choices == [(), RECOMPUTE]
