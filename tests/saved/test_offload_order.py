"""The plan of a step: what stays, what comes next, and how much has left at one time."""

import pytest

from pagestash.saved.offload.plan import GroupBytes, StepOrder, make_plan
from pagestash.saved.offload.window import Window


def events(text: str) -> list:
    """`F0 F1 B1 B0`: puts and gets; a get is followed by its drop."""
    found = []
    for word in text.split():
        key = (word[1:],)
        found += [("put", key)] if word[0] == "F" else [("get", key), ("drop", key)]
    return found


def plan(text: str, size: int = 10, window: int | None = None, **sizes: int):
    steps = events(text)
    groups = {
        key: GroupBytes(sizes.get(f"g{key[0]}", size), sizes.get(f"g{key[0]}", size), window)
        for _, key in steps
    }
    return make_plan(steps, groups), steps


def stays(made) -> set[str]:
    return {key[0] for key in made.stays}


@pytest.mark.parametrize(
    ("window", "expected"),
    [(0, {"4"}), (19, {"4"}), (20, {"3", "4"}), (30, {"2", "3", "4"}), (1000, {"0", "1", "2", "3", "4"})],
)
def test_the_last_groups_of_a_forward_stay_as_far_as_the_window_reaches(window, expected):
    made, _ = plan("F0 F1 F2 F3 F4 B4 B3 B2 B1 B0", window=window)
    assert stays(made) == expected


def test_without_a_window_it_is_three_times_the_largest_group():
    made, _ = plan("F0 F1 F2 F3 B3 B2 B1 B0", g0=50)
    assert made.window == 150
    assert stays(made) == {"0", "1", "2", "3"}
    made, _ = plan("F0 F1 F2 F3 F4 B4 B3 B2 B1 B0")
    assert stays(made) == {"2", "3", "4"}
    assert made.resident_peak_bytes == 30


def test_fetching_takes_no_more_than_was_resident_at_the_end_of_forward():
    made, _ = plan("F0 F1 F2 F3 B3 B2 B1 B0", window=29)
    assert made.resident_peak_bytes == 20
    assert Window(made).fetch_limit(("0",)) == 20
    # Unless that is too little for the group itself, which then comes alone.
    made, _ = plan("F0 F1 F2 B2 B1 B0", window=25, g1=25)
    assert stays(made) == {"2"}
    assert Window(made).fetch_limit(("1",)) == 25
    assert Window(made).fetch_limit(("0",)) == 10


def test_a_last_group_larger_than_the_window_stays_too():
    made, _ = plan("F0 F1 B1 B0", window=5)
    assert stays(made) == {"1"}


def test_every_microbatch_has_its_own_turn():
    made, _ = plan("F00 F01 B01 B00 F10 F11 B11 B10", window=0)
    assert stays(made) == {"01", "11"}


def test_one_forward_one_backward_keeps_the_microbatch_whose_backward_comes_next():
    # The last stage of 1F1B: a forward, its backward, and so on. The first stage: four in flight.
    made, _ = plan("F0 B0 F1 B1 F2 B2", window=0)
    assert stays(made) == {"0", "1", "2"}
    made, _ = plan("F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", window=0)
    assert stays(made) == set()
    # With a window, what is asked for soonest stays, beside one that leaves and one that is made.
    made, _ = plan("F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", window=30)
    assert stays(made) == {"0", "3", "4"}
    assert made.resident_peak_bytes == made.window == 30  # 5 leaves while 2 comes back
    made, _ = plan("F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", window=40)
    assert len(stays(made)) == 6


def test_a_group_that_is_never_asked_for_and_one_that_is_empty():
    made, _ = plan("F0 F1 B1", window=1000)
    assert stays(made) == {"1"}
    made, _ = plan("F0 F1 F2 B2 B1 B0", window=0, g0=0)
    assert stays(made) == {"0", "2"}


def test_what_has_left_at_one_time():
    made, steps = plan("F0 F1 F2 B2 B1 B0", window=0)
    assert made.host_peak_bytes(steps) == 20
    made, steps = plan("F0 F1 B1 B0 F2 F3 B3 B2", window=0)
    assert made.host_peak_bytes(steps) == 10


def test_what_comes_after_an_event():
    made, _ = plan("F0 F1 B1 B0")
    assert made.order[made.behind(("put", ("1",))) :] == [("get", ("1",)), ("get", ("0",))]
    assert made.order[made.behind(("get", ("0",))) :] == []
    assert made.order[made.behind(("get", ("unknown",))) :] == []


def test_groups_of_one_region_have_keys_of_their_own():
    order = StepOrder()
    first, second = order.key("a"), order.key("a")
    order.position = ("stage 1", 0)
    third = order.key("a")
    assert len({first, second, third}) == 3
    for key in (first, second):
        order.put(key, GroupBytes(1, 1))
    order.get(second)
    order.get(second)
    order.drop(second)
    assert order.events == [("put", first), ("put", second), ("get", second), ("drop", second)]
    made = make_plan(order.events, order.groups)
    assert made.agrees_with(order)
    order.get(first)
    assert not made.agrees_with(order)
    order.start()
    order.position = ()
    assert order.key("a") == first
    assert order.events == []


def test_what_stays_leaves_room_for_what_is_made_and_what_leaves():
    """In a pipeline a microbatch's groups wait while others are made: the window is not theirs alone."""
    made, _ = plan("F0 F1 F2 F3 F4 F10 F11 F12 F13 F14 B4 B3 B2 B1 B0 B14 B13 B12 B11 B10")
    # While the second forward runs one stays, one leaves, one is made; of its own groups two more fit at its end.
    assert stays(made) == {"4", "13", "14"}
    made, _ = plan("F0 F1 F2 F3 F4 F10 F11 F12 F13 F14 B4 B3 B2 B1 B0 B14 B13 B12 B11 B10", window=20)
    assert stays(made) == {"14"}
    assert made.resident_peak_bytes == 10
