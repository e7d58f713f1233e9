"""A plan is what a schedule does: the same actions in the same order, on every rank."""

import sys
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
)

sys.path.insert(0, str(Path(__file__).parent))
from gloo import EACH_SCHEDULE, FEW_AND_MANY, RUN_HERE, batch, make_schedule, make_stages, spawn, take_step
from support.tiers import slow

from pagestash.schedules.observe import Observation
from pagestash.schedules.plan import (
    SCHEDULES,
    Action,
    Plan,
    _flat,
    in_flight,
    orders_of_torch,
    plans,
    read_plan,
    schedule_name,
)


class Diary:
    """Writes down what it hears."""

    def __init__(self):
        self.steps, self.planned, self.open = [], [], None

    def begin_step(self, plan):
        self.planned.append(plan.actions)
        self.steps.append([])

    def end_step(self):
        assert self.open is None

    def begin(self, action):
        assert self.open is None
        self.open = action

    def end(self, action):
        assert self.open == action
        self.open = None
        self.steps[-1].append(action)


def observe_all(rank, world):
    """Every schedule with few and many microbatches, in turn on the same stages: planned and observed."""
    found = {}
    for name in RUN_HERE:
        stages, diary, observations = make_stages(name, rank, world), Diary(), []
        few, many = FEW_AND_MANY[name](world)
        for step, microbatches in enumerate((many, few, many)):
            # Stages serve the schedule that was first run last: another number of microbatches is another schedule.
            schedule = make_schedule(name, stages, microbatches)
            observations.append(Observation(schedule, diary))
            for again in range(2):
                take_step(schedule, stages, *batch(microbatches, 2 * step + again))
        for observation in observations:
            observation.remove()
        take_step(schedule, stages, *batch(many))  # nobody listens
        owners = (schedule, *stages)
        wrapped = [key for owner in owners for key in vars(owner) if "one_chunk" in key or key == "step"]
        found[name] = (many, few, many), diary.planned, diary.steps, wrapped
    return found


@pytest.fixture(scope="module", params=[2, *slow(4)])
def observed(request):
    return request.param, spawn(observe_all, request.param)


@pytest.mark.parametrize("name", EACH_SCHEDULE)
def test_a_schedule_does_what_was_planned(observed, name):
    world, ranks = observed
    for rank, found in enumerate(ranks):
        microbatches, planned, done, wrapped = found[name]
        numbers = [number for number in microbatches for _ in range(2)]
        for number, plan, actions in zip(numbers, planned, done, strict=True):
            assert tuple(actions) == plan
            # And what can be known without a process group is the same.
            assert plan == plans(name, ranks=world, microbatches=number)[rank].actions
        assert wrapped == []  # removed without a trace


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_microbatch_goes_forward_and_back_once_on_every_stage(name, ranks):
    few, many = FEW_AND_MANY[name](ranks)
    for microbatches in (few, many):
        every = plans(name, ranks=ranks, microbatches=microbatches)
        stages = sorted(stage for plan in every for stage in plan.stages)
        assert stages == list(range(len(stages)))
        for plan in every:
            for stage in plan.stages:
                calls = [a for a in plan.actions if a.stage == stage]
                assert sorted(a.microbatch for a in calls if a.kind == "F") == list(range(microbatches))
                assert sorted(a.microbatch for a in calls if a.kind in "BW") == list(range(microbatches))
                assert all(calls.index(Action("F", stage, a.microbatch)) < calls.index(a)
                           for a in calls if a.kind in "BI")  # fmt: skip
            assert list(plan.held())[-1] == dict.fromkeys(plan.stages, 0)


def test_in_flight_is_what_the_schedules_are_known_for():
    def most(name, **shape):
        return [in_flight(plan) for plan in plans(name, ranks=4, **shape)]

    assert most("1F1B", microbatches=8) == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert most("GPipe", microbatches=8) == [{stage: 8} for stage in range(4)]
    assert most("GPipe", microbatches=2) == [{stage: 2} for stage in range(4)]
    # Both chunks together: as many on every rank, which is what the V is for.
    for name in ("DualPipeV", "ZBVZeroBubble"):
        assert [sum(counts.values()) for counts in most(name, microbatches=12)] == [9] * 4


def test_a_halved_backward_holds_until_its_second_half():
    plan = Plan(
        (Action("F", 1, 0), Action("I", 1, 0), Action("F", 1, 1), Action("W", 1, 0), Action("B", 1, 1))
    )
    assert [counts[1] for counts in plan.held()] == [1, 1, 2, 1, 0]
    assert in_flight(plan) == {1: 2}
    assert plan.splits_backward
    assert str(plan) == "1F0 1I0 1F1 1W0 1B1"


class Stage:
    """The numbers of a stage; nobody runs it."""

    forward_one_chunk = backward_one_chunk = backward_weight_one_chunk = None

    def __init__(self, index, total, ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = (
            index,
            total,
            ranks,
            index % ranks,
        )
        self.submod, self.is_last = None, index == total - 1


def test_torch_lists_another_order_for_1f1b_than_it_runs():
    # Why this schedule is not read from its list. If this fails, torch has mended it.
    schedule = Schedule1F1B(Stage(3, 4, 4), 8, loss_fn=len)
    listed = [a.microbatch_index for a in schedule.pipeline_order[3] if a and a.computation_type.value == "F"]
    assert listed == list(range(1, 9))
    assert [a.microbatch for a in read_plan(schedule).actions if a.kind == "F"] == list(range(8))


def test_overlapping_pairs_come_one_after_the_other():
    stages = [Stage(0, 4, 2), Stage(3, 4, 2)]
    schedule = ScheduleDualPipeV(stages, 6, loss_fn=len)
    pair = next(a for a in schedule.pipeline_order[0] if a and a.computation_type == OVERLAP_F_B)
    text = str(read_plan(schedule))
    assert " ".join(map(str, pair.sub_actions)) in text


def test_without_a_loss_nothing_goes_back():
    plan = read_plan(ScheduleGPipe(Stage(0, 2, 2), 3))
    assert str(plan) == "0F0 0F1 0F2"


def test_a_schedule_that_cannot_be_followed_is_refused():
    class Mine(ScheduleGPipe):
        def _step_microbatches(self, *args, **kwargs):
            """Who knows what."""

    stage = Stage(0, 2, 2)
    with pytest.raises(ValueError, match=r"Mine cannot be followed.*ScheduleGPipe, Schedule1F1B.*DualPipeV"):
        Observation(Mine(stage, 2, loss_fn=len), Diary())
    assert "forward_one_chunk" not in vars(stage)
    with pytest.raises(ValueError, match="object cannot be followed"):
        read_plan(object())
    schedule = ScheduleDualPipeV([Stage(0, 4, 2), Stage(3, 4, 2)], 4, loss_fn=len)
    schedule.register_custom_function(OVERLAP_F_B, len)
    with pytest.raises(ValueError, match=r"ScheduleDualPipeV runs custom functions for .*OVERLAP_F_B"):
        read_plan(schedule)


def test_names_are_torchs_own():
    for name in SCHEDULES:
        assert hasattr(torch_schedules, f"Schedule{name}")
        assert schedule_name(f"schedule{name}".upper()) == name
    with pytest.raises(ValueError, match=r"unknown schedule '2F2B'; expected one of GPipe, 1F1B"):
        schedule_name("2F2B")


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("1F1B", {"ranks": 4, "microbatches": 3}, "at least as many microbatches as stages"),
        ("1F1B", {"ranks": 4, "microbatches": 8, "chunks": 2}, "1 stage per rank, not 2"),
        ("DualPipeV", {"ranks": 4, "microbatches": 8, "chunks": 3}, "2 stages per rank, not 3"),
        ("DualPipeV", {"ranks": 4, "microbatches": 7}, "at least as many microbatches as stages"),
        ("Interleaved1F1B", {"ranks": 4, "microbatches": 8, "chunks": 1}, "at least 2 stages per rank"),
        ("Interleaved1F1B", {"ranks": 4, "microbatches": 9}, "do not divide into 2 rounds"),
        ("GPipe", {"ranks": 0, "microbatches": 1}, "at least 1"),
    ],
)
def test_what_a_schedule_does_not_allow_is_said(name, shape, told):
    with pytest.raises(ValueError, match=told):
        plans(name, **shape)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_plan_of_interleaved_stages_is_torchs(ranks, chunks):
    for microbatches in (1, 2, 3, ranks, 2 * ranks, 3 * ranks, 2 * ranks + 2, 5 * ranks):
        if microbatches % max(1, microbatches // ranks):
            with pytest.raises(ValueError, match="rounds"):
                plans("Interleaved1F1B", ranks=ranks, microbatches=microbatches, chunks=chunks)
            continue
        own = plans("Interleaved1F1B", ranks=ranks, microbatches=microbatches, chunks=chunks)
        theirs = orders_of_torch("Interleaved1F1B", ranks, microbatches, chunks)
        assert [plan.actions for plan in own] == [tuple(_flat(theirs[rank])) for rank in range(ranks)]
