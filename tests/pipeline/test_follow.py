"""A keeper follows a schedule: every home, alone and mixed, gives what the schedule gives without a keeper."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import ScheduleGPipe, ScheduleZBVZeroBubble
from torch.utils.checkpoint import create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parent))
from gloo import (
    EACH_SCHEDULE,
    FEW_AND_MANY,
    RUN_HERE,
    WIDTH,
    batch,
    make_schedule,
    make_stages,
    spawn,
    stages_of,
    take_step,
)
from test_plan import Diary
from test_plan import Stage as Numbers

from pagestash import Keeper, Policy, PoolConfig, Rule
from pagestash.pipeline import SCHEDULES, Action, Observation, Plan, plans
from pagestash.schedules.plan import immediate_backwards

POOL = PoolConfig(page=256)
# Nothing is fetched ahead, so nothing stays but what the plan turns back at once: the figures are then exact.
LATE = {"min_bytes": 0, "prefetch_bytes": 0}
HOMES = {
    "keep": [Rule("layers.*", "keep")],
    "stash": [Rule("layers.*", "stash", min_bytes=0)],
    "offload": [Rule("layers.*", "offload", **LATE)],
    "recompute": [Rule("layers.*", "recompute")],
    "mixed": [
        Rule("layers.0", "offload", min_bytes=0),
        Rule("layers.1.first", "recompute"),
        Rule("layers.1", "stash", min_bytes=0),
        Rule("layers.2", "offload", min_bytes=0, prefetch_bytes=2048),
    ],
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class StageModel(nn.Module):
    """Three layers, each a region."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = x.clone()  # the first stage's input is a part of the batch, which would be counted whole
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(out, target):
    return nn.functional.mse_loss(out, target.clone())  # as above


def make_keeper(rules):
    counts = None if any(rule.moves for rule in rules) else True
    return Keeper(Policy(rules=rules, pool=POOL), backend="torch", check=counts)


class PlanInForce(Diary):
    """Notes the offload's plan when the step's first action begins."""

    def __init__(self, keeper):
        super().__init__()
        self.keeper, self.plan = keeper, None

    def begin_step(self, plan):
        super().begin_step(plan)
        self.plan = None

    def begin(self, action):
        super().begin(action)
        self.plan = self.plan or self.keeper._offload.plan


def steps_of(name, world):
    """Microbatches of each step: the first is measured, the last goes back to a number that was there before."""
    few, many = FEW_AND_MANY[name](world)
    return (many, many, few, many) if world == 2 else (many, many, few)


def run(name, rank, world, rules=None):
    """A few steps, with a keeper where there are rules: losses, gradients, and what each step held."""
    stages = make_stages(name, rank, world, StageModel)
    keeper, told = None, []
    if rules is not None:
        keeper = make_keeper(rules)
        for stage in stages:
            keeper.attach(stage.submod)
    results, schedule, before = [], None, 0
    for step, count in enumerate(steps_of(name, world)):
        for stage in stages:
            stage.submod.zero_grad()
        if count != before:
            schedule, before = make_schedule(name, stages, count, loss_of), count
            if keeper is not None:
                keeper.follow(schedule)
                watch = PlanInForce(keeper)
                Observation(schedule, watch)
        x, y = batch(count, step)
        if keeper is None:
            losses = take_step(schedule, stages, x, y)
        else:
            keeper.reset_peaks()
            with keeper.step():
                losses = take_step(schedule, stages, x, y)
            homes = {home: stats.peak for home, stats in keeper.stats().homes.items()}
            told.append((homes, watch.plan is keeper._offload.plan))
        gradients = [value.grad.clone() for stage in stages for value in stage.submod.parameters()]
        results.append((losses, gradients))
    return results, told


def run_all(rank, world, homes):
    found = {}
    for name in RUN_HERE:
        found[name, None] = run(name, rank, world)
        for home in homes[name]:
            found[name, home] = run(name, rank, world, HOMES[home])
    return found


# Every schedule with a mixture of all homes, and with one of them alone.
ONE_HOME = {
    "GPipe": "recompute",
    "1F1B": "offload",
    "LoopedBFS": "stash",
    "Interleaved1F1B": "keep",
    "InterleavedZeroBubble": "offload",
    "ZBVZeroBubble": "stash",
    "DualPipeV": "recompute",
}
RANKS = [
    pytest.param((2, {name: (home, "mixed") for name, home in ONE_HOME.items()}), id="2 ranks"),
    pytest.param((4, dict.fromkeys(SCHEDULES, tuple(HOMES))), id="4 ranks", marks=pytest.mark.slow),
    pytest.param(
        (2, dict.fromkeys(SCHEDULES, tuple(HOMES))), id="2 ranks, every home", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module", params=RANKS)
def ran(request):
    world, homes = request.param
    return world, homes, spawn(run_all, world, homes)


@pytest.mark.parametrize("name", EACH_SCHEDULE)
def test_losses_and_gradients_are_the_schedules_own_to_the_last_bit(ran, name):
    _, homes, ranks = ran
    for found, home in itertools.product(ranks, homes[name]):
        for (losses, gradients), (plain, expected) in zip(
            found[name, home][0], found[name, None][0], strict=True
        ):
            assert losses == plain
            assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("name", EACH_SCHEDULE)
def test_the_schedule_trains_what_one_process_does(ran, name):
    world, _, ranks = ran
    stages = world * len(stages_of(name, 0, world))
    whole = [StageModel(number) for number in range(stages)]
    for step, count in enumerate(steps_of(name, world)):
        x, y = batch(count, step)
        losses = []
        for model in whole:
            model.zero_grad()
        for part, target in zip(x.chunk(count), y.chunk(count)):
            for model in whole:
                part = model(part)
            losses.append(nn.functional.mse_loss(part, target))
        torch.stack(losses).mean().backward()
        for rank, found in enumerate(ranks):
            told, gradients = found[name, None][0][step]
            if told:
                torch.testing.assert_close(torch.tensor(told), torch.stack(losses).detach())
            own = [value for number in stages_of(name, rank, world) for value in whole[number].parameters()]
            for ours, value in zip(gradients, own, strict=True):
                torch.testing.assert_close(ours, value.grad)


@pytest.mark.parametrize("name", EACH_SCHEDULE)
def test_another_number_of_microbatches_is_planned_before_it_first_runs(ran, name):
    _, homes, ranks = ran
    for rank, found in enumerate(ranks):
        for home in {"offload", "mixed"} & set(homes[name]):
            # The second step has the plan of the first, which was measured; the third is the first of its number.
            as_planned = [agreed for _, agreed in found[name, home][1]]
            assert all(as_planned[1:]), (rank, home)


# --- how much is held ---


def sizes_of(rules, number, last):
    """Bytes that one microbatch holds in each home: after its forward, and after half of its backward."""
    model, keeper = StageModel(number), make_keeper(rules)
    keeper.attach(model)
    x, y = (part.requires_grad_(part is not None) for part in batch(1))
    with keeper.step(check=False):
        out = model(x)
        if last:
            out = loss_of(out, y.detach())
        full = dict(keeper.held())
        if number == 0:
            return full, full  # its whole backward is the second half
        gradient = None if last else [torch.ones_like(out)]
        _, kept = stage_backward_input([out], gradient, [x], model.parameters())
        half = dict(keeper.held())
        del kept
    return full, half


def implied_peak(plan, sizes, home, *, leaves_out=frozenset()):
    """The largest sum, over a rank's actions, of what the schedule says it holds."""
    held, now, most = {}, 0, 0
    for action in plan.actions:
        key = (action.stage, action.microbatch)
        if key in leaves_out:
            continue
        full, half = sizes[action.stage]
        held[key] = {"F": full[home], "I": half[home]}.get(action.kind, 0)
        now = sum(held.values())
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", EACH_SCHEDULE)
def test_peak_saved_bytes_are_those_that_the_schedule_implies(ran, name):
    world, homes, ranks = ran
    total = world * len(stages_of(name, 0, world))
    alone = {"keep", "stash", "offload"} & set(homes[name])
    for (rank, found), home in itertools.product(enumerate(ranks), alone):
        sizes = {
            number: sizes_of(HOMES[home], number, number == total - 1)
            for number in stages_of(name, rank, world)
        }
        assert all(full[home] > 0 for full, _ in sizes.values())
        for step, count in enumerate(steps_of(name, world)):
            if step == 0:
                continue  # measured, everything moved
            plan = plans(name, ranks=world, microbatches=count)[rank]
            stay = immediate_backwards(plan) if home == "offload" else frozenset()
            peaks, _ = found[name, home][1][step]
            assert peaks[home] == implied_peak(plan, sizes, home, leaves_out=stay), (rank, step)


@pytest.mark.parametrize("ran", RANKS[:2], indirect=True)
def test_later_ranks_offload_less_and_the_last_nothing(ran):
    _, _, ranks = ran
    moved = [found["1F1B", "offload"][1][1][0]["offload"] for found in ranks]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == 0


def test_immediate_backwards_are_where_backward_follows_forward():
    def at(name, rank):
        return immediate_backwards(plans(name, ranks=4, microbatches=8)[rank])

    assert at("1F1B", 3) == {(3, microbatch) for microbatch in range(8)}
    assert at("1F1B", 0) == frozenset()
    assert at("GPipe", 0) == frozenset()
    assert at("LoopedBFS", 3) == {(7, 7)}
    halves = Plan((Action("F", 2, 0), Action("I", 2, 0), Action("F", 2, 1), Action("W", 2, 0)))
    assert immediate_backwards(halves) == {(2, 0)}


# --- refusals ---


def selective(module):
    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: None)

    return checkpoint_wrapper(module, context_fn=contexts)


def with_module(index, total, ranks, module):
    stage = Numbers(index, total, ranks)
    stage.submod = module
    return stage


def test_selective_checkpoints_under_a_split_backward_are_refused_ahead():
    model = StageModel(0)
    keeper = make_keeper(HOMES["keep"]).attach(model)
    model.layers[1] = selective(model.layers[1])
    stages = [with_module(0, 4, 2, model), with_module(3, 4, 2, nn.Identity())]
    with pytest.raises(
        ValueError, match=r"ScheduleZBVZeroBubble splits backward, and layers.1 is checkpointed"
    ):
        keeper.follow(ScheduleZBVZeroBubble(stages, 4, loss_fn=len))
    keeper.follow(ScheduleGPipe(with_module(0, 2, 2, model), 4, loss_fn=len))  # its backward is whole


def test_whole_checkpoints_are_not():
    model = StageModel(0)
    keeper = make_keeper(HOMES["keep"]).attach(model)
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    stages = [with_module(0, 4, 2, model), with_module(3, 4, 2, nn.Identity())]
    keeper.follow(ScheduleZBVZeroBubble(stages, 4, loss_fn=len))


def test_a_schedule_that_cannot_be_followed_is_refused():
    keeper = make_keeper(HOMES["keep"]).attach(StageModel(0))
    with pytest.raises(ValueError, match="cannot be followed"):
        keeper.follow(object())
