"""Under a schedule, the same part of each microbatch leaves, in a keeper's steps and where they are predicted."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gloo import make_schedule
from torch import nn
from torch.distributed.pipelining import PipelineStage

import pagestash as ps
from pagestash.pipeline import plans
from pagestash.planning.prediction import RuleTable
from pagestash.planning.rank import RankPredictor, RankStep
from pagestash.planning.stage import stage_step
from pagestash.profiling import Link
from pagestash.saved.offload.plan import GroupBytes, StepOrder
from pagestash.saved.offload.split import EntryShape, RowSplit

WIDTH, ROWS = 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rule(fraction):
    return ps.Rule("layers.*.linear", "offload", fraction=fraction, prefetch_bytes=0, min_bytes=0)


class Half(nn.Module):
    """A stage of a rank that has two."""

    def __init__(self, first: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(first)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(first, first + depth)})

    def forward(self, x):
        x = x.clone()
        for layer in self.layers.values():
            x = layer(x)
        return x


def left_by_each(depth, fraction, microbatches):
    """Bytes that left the device in each microbatch's forward of the third step."""
    model = Net(depth)
    schedule = make_schedule("GPipe", [PipelineStage(model, 0, 1, torch.device("cpu"))], microbatches)
    keeper = ps.Keeper(ps.Policy([rule(fraction)]), backend="torch").attach(model)
    keeper.follow(schedule)
    found = []
    model.register_forward_hook(lambda *_: found.append(keeper.stats().homes["offload"].bytes))
    for step in range(3):
        found.clear()
        x, y = torch.randn(2, ROWS * microbatches, WIDTH, generator=torch.Generator().manual_seed(step))
        with keeper.step():
            schedule.step(x, target=y)
    keeper.detach()
    return [after - before for before, after in zip([0, *found], found)]


@pytest.mark.parametrize(
    ("depth", "fraction", "microbatches"), [(3, 0.5, 2), (3, 0.5, 4), (5, 0.3, 3), (4, 0.5, 3)]
)
def test_the_same_part_of_each_microbatch_leaves_under_a_schedule(depth, fraction, microbatches):
    wanted = fraction * depth * ROWS * WIDTH * 4
    left = left_by_each(depth, fraction, microbatches)
    assert len(left) == microbatches
    assert len(set(left)) == 1
    assert abs(left[0] - wanted) <= ROWS * WIDTH * 4 / 2

    profile = ps.profile(Net(depth), torch.randn(ROWS, WIDTH), repeats=1, link=Link(out=1e15, back=1e15))
    order = plans("GPipe", ranks=1, microbatches=microbatches)[0]
    stage = stage_step(profile, 0, is_last=True, result_bytes=None)
    predicted = RankPredictor(RankStep([stage], order)).predict(
        RuleTable({f"layers.{n}.linear": rule(fraction) for n in range(depth)}, ps.PoolConfig())
    )
    assert predicted.moved_bytes == sum(left)


@pytest.mark.parametrize(("depth", "fraction"), [(1, 0.5), (2, 0.25)])
def test_a_microbatch_goes_on_in_the_ranks_next_stage(depth, fraction):
    """Of two stages with one layer each, half of the bytes are one layer's."""
    order = StepOrder()
    split = RowSplit({})
    own, size = rule(fraction), ROWS * WIDTH * 4
    left = {}
    for stage in range(2):  # all microbatches of a stage, and then of the next one
        for microbatch in range(3):
            order.position = (stage, microbatch)
            for layer in range(depth):
                order.key(f"layers.{stage * depth + layer}.linear")
                split.go_on_with(order.microbatch)
                left[microbatch] = left.get(microbatch, 0) + split.share(own, EntryShape(size))
    assert set(left.values()) == {round(2 * depth * fraction) * size}

    profiles = {n: Half(n * depth, depth) for n in range(2)}
    given = torch.randn(ROWS, WIDTH)
    link = Link(out=1e15, back=1e15)
    stages = [
        stage_step(ps.profile(model, given, repeats=1, link=link), n, is_last=n == 1, result_bytes=None)
        for n, model in profiles.items()
    ]
    plan = plans("LoopedBFS", ranks=1, microbatches=3, chunks=2)[0]
    rules = {f"layers.{n}.linear": replace(own, match="layers.*.linear") for n in range(2 * depth)}
    predicted = RankPredictor(RankStep(stages, plan)).predict(RuleTable(rules, ps.PoolConfig()))
    assert predicted.moved_bytes == sum(left.values())


def test_what_runs_beside_a_schedule_owes_nothing_to_its_microbatches():
    """Another model under the same rule, before, between and after them."""
    order, split = StepOrder(), RowSplit({})
    own, size = rule(0.5), ROWS * WIDTH * 4

    def left(position, layers=3):
        order.position = position
        found = []
        for layer in range(layers):
            key = order.key(f"layers.{layer}.linear")
            split.go_on_with(order.microbatch)
            found.append(split.share(own, EntryShape(size)))
            order.put(key, GroupBytes(size, size))
        order.get(key)
        return found

    alone = left((0, 0))
    assert sum(alone) in (size, 2 * size)
    for _ in range(2):
        order.start()
        split.start()
        steps = [left((), 1), left((0, 0)), left((), 1), left((0, 1)), left((0, 2)), left((), 1)]
        assert [each for each in steps if len(each) == 3] == 3 * [alone]
        assert [each for each in steps if len(each) == 1] == 3 * [alone[:1]]
