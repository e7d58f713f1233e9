"""The search for better candidates, by what it is told about assignments."""

from typing import NamedTuple

import pytest

from pagestash.planning.choices import Choice, Group, Unit
from pagestash.planning.prediction import Cost
from pagestash.planning.search import APART, BLOCKS, Search

RECOMPUTE: Choice = (("mlp", "recompute", 1.0),)
MOVE: Choice = (("mlp", "offload", 1.0),)
OTHER: Choice = (("attention", "offload", 1.0),)


class Found(NamedTuple):
    mean_seconds: float
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
