"""How far memory is from its peak, and what follows for copies."""

import torch
from torch import nn

import pagestash as ps
from pagestash.saved.pressure import Pressure, Reading, read_memory


def pressure_of(*readings):
    """Four events with these readings at each, and one when the step is over."""
    told = iter(readings)
    pressure = Pressure(lambda: next(told))
    pressure.start()
    for event in EVENTS:
        pressure.note(event)
    return pressure


EVENTS = [("put", ("a",)), ("put", ("b",)), ("get", ("b",)), ("get", ("a",))]


def test_slack_is_the_distance_to_the_peak_of_the_step():
    # The peak of 900 is between the first get and the second.
    pressure = pressure_of(
        Reading(100, 150, 0),
        Reading(100, 300, 0),
        Reading(100, 500, 0),
        Reading(100, 900, 0),
        Reading(100, 5000, 0),
    )
    assert pressure.slack() == {EVENTS[0]: 600, EVENTS[1]: 400, EVENTS[2]: 0}


def test_gradients_that_stay_count_as_if_they_had_been_there_before():
    # 250 of the 900 are gradients made by then, which the next step may begin with.
    pressure = pressure_of(
        Reading(100, 150, 0),
        Reading(100, 300, 0),
        Reading(100, 500, 250),
        Reading(350, 900, 400),
        Reading(500, 5000, 400),
    )
    assert pressure.slack() == {EVENTS[0]: 350, EVENTS[1]: 150, EVENTS[2]: 0}


def test_what_else_a_step_leaves_behind_is_no_slack():
    pressure = pressure_of(
        Reading(100, 150, 0),
        Reading(100, 300, 0),
        Reading(100, 500, 0),
        Reading(100, 900, 0),
        Reading(550, 5000, 0),  # an optimizer's state
    )
    assert pressure.slack() == {EVENTS[0]: 150, EVENTS[1]: 0, EVENTS[2]: 0}


def test_a_device_without_an_allocator_to_ask_has_no_slack():
    assert read_memory(torch.device("cpu"), []) is None
    assert pressure_of(*[None] * 5).slack() == {}


def test_nothing_is_read_where_nothing_is_offloaded():
    """Reading starts the allocator's peak anew, which may be somebody else's."""
    model = nn.Linear(8, 8)
    keeper = ps.Keeper(ps.Policy([])).attach(model)

    def read():
        raise AssertionError("read")

    keeper._offload._pressure = Pressure(read)
    with keeper.step():
        model(torch.randn(4, 8)).sum().backward()
