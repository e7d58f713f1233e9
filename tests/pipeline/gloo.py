"""Small pipelines over gloo processes, for the tests of this folder."""

import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import start_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from pagestash.schedules.plan import SCHEDULES, V_SHAPED, stages_a_rank
from pagestash.train.prepare import splits_backward

WIDTH = 8

FEW_AND_MANY = {
    "GPipe": lambda ranks: (1, 2 * ranks + 1),
    "1F1B": lambda ranks: (ranks, 2 * ranks + 1),  # refuses fewer microbatches than stages
    "LoopedBFS": lambda ranks: (1, 2 * ranks + 1),
    "Interleaved1F1B": lambda ranks: (1, 3 * ranks),
    "InterleavedZeroBubble": lambda ranks: (1, 3 * ranks),
    "ZBVZeroBubble": lambda ranks: (1, 2 * ranks + 3),
    "DualPipeV": lambda ranks: (2 * ranks, 2 * ranks + 3),  # refuses fewer
}
"""For each schedule, a number of microbatches that is small and one that is large for its stages."""


RUN_HERE = tuple(name for name in SCHEDULES if name not in V_SHAPED or splits_backward())
"""The schedules that this torch can run over gloo."""
EACH_SCHEDULE = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name not in RUN_HERE,
            reason="gloo of this torch cannot send to its own rank, as V-shaped schedules do",
        ),
    )
    for name in SCHEDULES
]


def spawn(work, world, *args):
    """Run `work(rank, world, *args)` on `world` processes; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(_enter, (work, world, folder, args), world)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(rank, work, world, folder, args):
    torch.set_num_threads(1)
    # A port of the machine would be a race between test runs.
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=20))
    try:
        torch.save(work(rank, world, *args), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Layer(nn.Module):
    """Something with a bend, so that its backward needs saved tensors."""

    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def stages_of(name, rank, ranks, chunks=None):
    """The numbers of a rank's stages."""
    chunks = stages_a_rank(name, chunks)
    if name in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


def make_stages(name, rank, ranks, make=Layer, chunks=None):
    """This rank's stages, each with the module that `make` gives for its number."""
    numbers = stages_of(name, rank, ranks, chunks)
    total = ranks * len(numbers)
    return [PipelineStage(make(number), number, total, torch.device("cpu")) for number in numbers]


def make_schedule(name, stages, microbatches, loss=nn.functional.mse_loss, **options):
    kind = getattr(torch_schedules, f"Schedule{name}")
    return kind(stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=loss, **options)


def batch(microbatches, step=0, rows=2):
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, y = (torch.randn(microbatches * rows, WIDTH, generator=generator) for _ in range(2))
    return x, y


def take_step(schedule, stages, x, y):
    """One step, wherever the first and the last stage are; the losses of the microbatches where the last is."""
    losses = []
    first = (x,) if any(stage.is_first for stage in stages) else ()
    target = {"target": y, "losses": losses} if any(stage.is_last for stage in stages) else {}
    schedule.step(*first, **target)
    return [loss.item() for loss in losses]
