"""How far memory is from its peak, and what follows for copies."""

from itertools import chain, repeat

import torch
from torch import nn

import pagestash as ps
from pagestash.saved.offload.headroom import HeadroomMeter, Reading, read_memory
from pagestash.saved.offload.plan import GroupBytes, make_plan

EVENTS = [("put", ("a",)), ("put", ("b",)), ("get", ("b",)), ("get", ("a",))]


def headroom(*readings):
    """Of four events with these readings at each."""
    told = iter(readings)
    meter = HeadroomMeter(lambda: next(told))
    for event in EVENTS:
        meter.note(event)
    return meter.headroom()


def test_headroom_is_the_distance_to_the_peak_of_the_step():
    # The peak of 900 is between the first get and the second.
    found = headroom(
        Reading(100, 150, {}),
        Reading(100, 300, {}),
        Reading(100, 500, {}),
        Reading(100, 900, {}),
    )
    assert found == {EVENTS[0]: 600, EVENTS[1]: 400, EVENTS[2]: 0}


def test_gradients_that_stay_count_as_if_they_had_been_there_before():
    # 250 were made before the peak; the next step may begin with them.
    found = headroom(
        Reading(100, 150, {}),
        Reading(100, 300, {}),
        Reading(350, 500, {1: 250}),
        Reading(350, 900, {1: 250}),
    )
    assert found == {EVENTS[0]: 350, EVENTS[1]: 150, EVENTS[2]: 0}


def test_of_gradients_made_at_the_peak_the_largest_is_made_again():
    # 300 of the 900 are gradients that were made there: a step that has them needs 200 of it at one time.
    found = headroom(
        Reading(100, 150, {}),
        Reading(100, 300, {}),
        Reading(100, 500, {}),
        Reading(400, 900, {1: 100, 2: 200}),
    )
    assert found == {EVENTS[0]: 500, EVENTS[1]: 300, EVENTS[2]: 0}


def test_what_else_a_step_leaves_behind_is_no_headroom():
    found = headroom(
        Reading(100, 150, {}),
        Reading(100, 300, {}),
        Reading(100, 500, {}),
        Reading(550, 900, {}),
    )
    assert found == {EVENTS[0]: 150, EVENTS[1]: 0, EVENTS[2]: 0}


def test_a_device_without_an_allocator_to_ask_has_no_headroom():
    assert read_memory(torch.device("cpu"), list) is None
    assert headroom(*[None] * 4) == {}


def test_memory_that_is_taken_later_is_no_headroom():
    plan = make_plan(EVENTS, {("a",): GroupBytes(1, 1), ("b",): GroupBytes(1, 1)})
    plan.headroom = {EVENTS[0]: 600, EVENTS[1]: 400}
    plan.tighten(500)
    assert plan.headroom == {EVENTS[0]: 100, EVENTS[1]: 0}


def test_a_pool_that_is_made_takes_its_part():
    """While it was measured, what is stashed came and went."""
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    rules = [ps.Rule("a", "offload", min_bytes=0), ps.Rule("b", "stash", min_bytes=0)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024)), backend="torch").attach(model)
    peaks = chain([0, 1 << 20], repeat(2 << 20))
    keeper._offload.measured.meter = HeadroomMeter(lambda: Reading(100, next(peaks), {}))
    x = torch.randn(32, 64, requires_grad=True)
    with keeper.step():
        (model["b"](model["a"](x) * 2.0).sum() + model["a"](x + 1).sum()).backward()
    taken = keeper.pool.device_pages * 1024
    assert taken
    assert keeper._offload.plan.headroom[("put", ("a", 0))] == (1 << 20) - taken


def test_nothing_is_read_where_nothing_is_offloaded():
    """Reading starts the allocator's peak anew, which may be somebody else's."""
    model = nn.Linear(8, 8)
    keeper = ps.Keeper(ps.Policy([])).attach(model)

    def read():
        raise AssertionError("read")

    keeper._offload.measured.meter = HeadroomMeter(read)
    with keeper.step():
        model(torch.randn(4, 8)).sum().backward()
