"""The window's inequalities, over random schedules: what stays, what leaves, and what is fetched when."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestash.saved.offload.plan import GroupBytes, OffloadPlan, make_plan
from pagestash.saved.offload.window import Window, WindowGroup


def schedule(random: Random, groups: int) -> list:
    """Puts, gets and drops of so many groups, in an order that a step with several microbatches may have."""
    events, waiting, asked = [], [], []
    new = [(f"g{number}", 0) for number in range(groups)]
    while new or waiting or asked:
        choices = [("put", new)] * 3 + [("get", waiting), ("again", asked), ("drop", asked)]
        kind, keys = random.choice([choice for choice in choices if choice[1]])
        # Forward goes on where it is, backward as a rule with what was put last.
        key = keys[0] if kind == "put" else keys[-1] if random.random() < 0.7 else random.choice(keys)
        if kind == "put":
            new.remove(key)
            waiting.append(key)
        elif kind == "get":
            waiting.remove(key)
            if random.random() < 0.05:  # its graph dies unused
                events.append(("drop", key))
                continue
            asked.append(key)
        elif kind == "drop":
            asked.remove(key)
        events.append(("get" if kind == "again" else kind, key))
    return events


def first_gets(events: list) -> list:
    """As they are recorded: of each group's gets the first."""
    seen = set()
    return [event for event in events if event[0] != "get" or not (event in seen or seen.add(event))]


@dataclass
class Case:
    plan: object
    events: list
    sizes: dict
    refused: set = field(default_factory=set)


@st.composite
def cases(draw, *, by_plan: bool = True) -> Case:
    random = draw(st.randoms(use_true_random=False))
    count = draw(st.integers(1, 9))
    events = schedule(random, count)
    planned = events if by_plan else schedule(random, draw(st.integers(1, 9)))
    common = draw(st.none() | st.integers(0, 60))
    windows = {key: draw(st.sampled_from([common, None, 0, 25])) for _, key in events + planned}
    sizes = {key: draw(st.integers(1, 12)) for key in windows}
    groups = {key: GroupBytes(sizes[key], sizes[key], windows[key]) for _, key in planned}
    plan = make_plan(first_gets(planned), groups)
    if draw(st.booleans()):
        plan.headroom = {("put", key): draw(st.integers(0, 80)) for key in groups}
    refused = {key for key in sizes if draw(st.integers(0, 9)) == 0}
    return Case(plan, events, sizes, refused)


class Driver:
    """Carries out what the window decides, keeps its own books, and holds the window to its word."""

    def __init__(self, case: Case, random: Random) -> None:
        self.case, self.plan, self.random = case, case.plan, random
        self.window = Window(case.plan)
        self.live: dict = {}
        self.back: set = set()
        self.leaving: list = []

    def resident(self) -> int:
        stay = [key for key in self.live if key in self.plan.stays]
        return sum(self.case.sizes[key] for key in (*stay, *self.back))

    def left(self) -> int:
        return sum(self.case.sizes[group.key] for group in self.leaving)

    def present(self) -> int:
        kept = [key for key in self.live if key in self.plan.stays or key in self.case.refused]
        return sum(self.case.sizes[key] for key in (*kept, *self.back))

    def run(self) -> None:
        for event in self.case.events:
            kind, key = event
            if kind == "put":
                self.put(key)
            elif kind == "get":
                group = self.live[key]
                self.some_have_left()
                self.carry_out(self.window.get(group, kept=not group.away_bytes), event)
                assert not group.away_bytes or key in self.back
            else:
                self.window.drop(self.live.pop(key))
                self.back.discard(key)
            assert (self.window.resident, self.window.leaving) == (self.resident(), self.left())
            assert self.window.present == self.present()
            self.holds_after(event)

    def put(self, key) -> None:
        size = self.case.sizes[key]
        if key in self.plan.stays or key in self.case.refused:
            group = WindowGroup(key, size, kept_bytes=size)
        else:
            group = WindowGroup(key, size, size, size, leaving_bytes=size)
            self.leaving.append(group)
        self.live[key] = group
        self.window.put(group)
        self.some_have_left()
        self.carry_out(self.window.after_put(group), ("put", key))

    def some_have_left(self) -> None:
        while self.leaving and self.random.random() < 0.2:
            self.leaving.pop(0)
            self.window.gone()

    def carry_out(self, decisions, event) -> None:
        used = False
        for what, group in decisions:
            if what == "let go":
                assert self.leaving.pop(0) is group
            elif what == "fetch":
                assert group.key not in self.plan.stays
                assert group.key not in self.back  # never twice
                assert group not in self.leaving  # what is on the device need not come back
                if event != ("get", group.key):
                    self.fits_ahead(group.key, event)
                self.back.add(group.key)
            else:
                assert event == ("get", group.key)
                assert group.key in self.back
                used = True
        assert used == (event[0] == "get" and bool(self.live[event[1]].away_bytes))

    def fits_ahead(self, key, event) -> None:
        """It fits with all that is resident, and with all that the plan puts or asks for before it."""
        taken, counted = self.resident(), set()
        for kind, other in self.plan.order[self.plan.behind(event) :]:
            if other not in counted and not self.is_there(other):
                counted.add(other)
                taken += self.plan.groups[other].device_bytes
                if kind == "put" or other in self.plan.stays:
                    assert taken <= self.plan.window
            if (kind, other) == ("get", key):
                break
        assert taken <= self.window.fetch_limit(key)
        assert not self.left() or taken + self.left() <= self.plan.window

    def is_there(self, key) -> bool:
        return key in self.live and (key in self.back or not self.live[key].away_bytes)

    def holds_after(self, event) -> None:
        kind, key = event
        if kind == "drop" or not self.left():
            return
        window = self.plan.window_of(key)
        if kind == "get":
            assert self.resident() + self.left() <= max(window, self.plan.window)
            return
        following = next(iter(self.plan.order[self.plan.behind(event) :]), ("get", key))
        coming = 0
        if following[0] == "put":
            window, coming = max(window, self.plan.window), self.plan.groups[following[1]].device_bytes
        near = self.resident() + self.left() + coming <= window
        assert near or self.present() + self.left() <= self.plan.headroom[event]


@settings(max_examples=200)
@given(cases(), st.randoms(use_true_random=False))
def test_a_step_that_goes_by_the_plan_keeps_to_the_inequalities(case, random):
    Driver(case, random).run()


@settings(max_examples=200)
@given(cases(by_plan=False), st.randoms(use_true_random=False))
def test_a_step_that_leaves_the_plan_is_right_too(case, random):
    Driver(case, random).run()


@given(cases(), st.randoms(use_true_random=False))
def test_the_end_of_a_step_leaves_nothing(case, random):
    driver = Driver(case, random)
    driver.run()
    for decision in driver.window.let_all_go():
        assert decision == ("let go", driver.leaving.pop(0))
    assert not driver.leaving
    assert not driver.window.groups
    assert driver.window.resident == driver.window.leaving == driver.window.present == 0


@pytest.mark.parametrize("window", [0, 10, 20, 30, 40])
def test_backward_is_served_before_it_asks_if_the_window_has_room_for_two(window):
    keys = [(name, 0) for name in "abcdef"]
    sizes = dict.fromkeys(keys, 10)
    order = [("put", key) for key in keys]
    for key in reversed(keys):
        order += [("get", key), ("drop", key)]
    plan = make_plan(order, {key: GroupBytes(10, 10, window) for key in keys})
    driver, late = Driver(Case(plan, order, sizes), Random(0)), []
    right = driver.carry_out

    def note(decisions, event):
        def watched():
            for decision in decisions:
                late.extend(
                    [event[1]] if decision.what == "fetch" and event == ("get", decision.group.key) else []
                )
                yield decision

        right(watched(), event)

    driver.carry_out = note
    driver.run()
    moved = [key for key in reversed(keys) if key not in plan.stays]
    assert late == ([] if window >= 20 else moved)


def test_a_key_that_is_put_again_while_its_group_of_an_earlier_step_waits():
    """Both groups are counted, each until its own end."""
    key = ("a", 0)
    window = Window(make_plan([("put", key), ("get", key)], {key: GroupBytes(5, 5)}))
    window.plan.stays = frozenset()
    earlier, later = (WindowGroup(key, 5, 5, 5, leaving_bytes=5) for _ in range(2))
    for group in (earlier, later):
        window.put(group)
    assert [decision.what for decision in window.get(earlier)] == ["let go", "fetch", "use"]
    assert (window.resident, window.leaving, window.present) == (5, 5, 5)
    window.drop(earlier)
    assert window.groups == {key: later}
    assert (window.resident, window.leaving, window.present) == (0, 5, 0)
    assert [decision.what for decision in window.get(later)] == ["let go", "fetch", "use"]


def put(window, key, *, stays=False) -> list:
    """Put a group of 10 bytes; returns what is done then."""
    group = WindowGroup(key, 10, kept_bytes=10) if stays else WindowGroup(key, 10, 10, 10, leaving_bytes=10)
    window.put(group)
    return told(window.after_put(group))


def told(decisions) -> list:
    return [(decision.what, decision.group.key[0]) for decision in decisions]


def test_what_leaves_gives_way_to_what_is_asked_for():
    keys = [(name, 0) for name in "abcde"]
    order = [("put", key) for key in keys] + [("get", key) for key in keys]
    groups = {key: GroupBytes(10, 10, window=15 if key == keys[0] else None) for key in keys}
    plan = OffloadPlan(groups, order, window=30, stays=frozenset(keys[1:2]))
    window = Window(plan)
    done = [put(window, key, stays=key in plan.stays) for key in keys]
    # With `b` there is room in the window for one that leaves and one that is made; at the end for two that leave.
    assert done == [[], [], [("let go", "a")], [("let go", "c")], []]
    assert (window.resident, window.leaving) == (10, 20)
    # `a` has a window of 15, which it and `b` overrun: it was not fetched ahead, and all that leaves makes room.
    asked = [("let go", "d"), ("let go", "e"), ("fetch", "a"), ("use", "a")]
    assert told(window.get(window.groups[keys[0]])) == asked


def test_a_group_that_is_put_before_another_is_asked_for_has_its_place_first():
    a, x, y = (("a", 0), ("x", 0), ("y", 0))
    groups = {a: GroupBytes(10, 10, window=100), x: GroupBytes(10, 10), y: GroupBytes(20, 20)}
    order = [("put", a), ("put", x), ("get", x), ("put", y), ("get", y), ("get", a)]
    fetched = [("let go", "a"), ("fetch", "a")]
    for size, done in ((25, [[], []]), (30, [fetched, []])):  # x and y, which come before it, take 30
        plan = OffloadPlan(groups, order, window=size, stays=frozenset([x]), resident_peak_bytes=40)
        window = Window(plan)
        assert [put(window, a), put(window, x, stays=True)] == done
