"""Schedules that take turns over the same stages each have offload's plan for their own step."""

from contextlib import nullcontext
from types import SimpleNamespace

from pagestash.saved.follow import _Following
from pagestash.saved.offload.plan import GroupBytes, StepOrder
from pagestash.schedules.plan import Action, Plan


class Offload:
    """Remembers what it was told to expect, and how often."""

    def __init__(self) -> None:
        self.order = StepOrder()
        self.groups, self.plan, self.told = {(0, 0, "r", 0): GroupBytes(8, 8)}, [], 0

    def expect(self, events, groups):
        self.plan, self.groups = [event for event in events if event[0] != "drop"], groups
        self.told += 1

    @property
    def window(self):
        return SimpleNamespace(plan=SimpleNamespace(groups=self.groups))


def plan(microbatches: int) -> Plan:
    forwards = tuple(Action("F", 0, number) for number in range(microbatches))
    return Plan(forwards + tuple(Action("B", 0, number) for number in range(microbatches)))


def test_each_schedule_puts_its_own_plan_in_place():
    offload = Offload()
    stage_events = {("F", 0): [("put", (0, "r", 0))], ("B", 0): [("get", (0, "r", 0))]}
    two, three = (_Following(offload, nullcontext, stage_events) for _ in range(2))
    for follower, count in ((two, 2), (three, 3), (two, 2), (three, 3)):
        follower.begin_step(plan(count))
        follower.end_step()
        assert len(offload.plan) == 2 * count
    # Nothing is planned anew for a schedule that goes on by itself, unless a step went its own way.
    told = offload.told
    three.begin_step(plan(3))
    three.end_step()
    assert offload.told == told
    offload.groups = dict(offload.groups)
    three.begin_step(plan(3))
    assert offload.told == told + 1
