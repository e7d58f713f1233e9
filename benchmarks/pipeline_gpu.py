"""Offload under a pipeline's schedule: several processes on one GPU, each a rank, over gloo.

Gloo sends host tensors, so a stage takes and gives those and computes on the GPU. Every process has an allocator of
its own, whose peak is the rank's. What it should fall by follows from the schedule's plan: the most bytes that are
saved at one time, less a window (three layers), and less the most that is saved of microbatches whose backward
comes at once, which stay. On the last rank of 1F1B that is each of them.
"""

import tempfile
from contextlib import nullcontext
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from benchmarks.harness import Claim, write
from pagestash import Keeper, Policy, Rule
from pagestash.pipeline import Plan, plans
from pagestash.saved.offload.plan import WINDOW
from pagestash.schedules.plan import immediate_backwards

WIDTH, ROWS, LAYERS = 1024, 4096, 12
SCHEDULES = ("1F1B", "Interleaved1F1B")
MIB = 2**20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stage(nn.Module):
    """Layers on the GPU between host tensors."""

    def __init__(self, number: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.cuda()
        for layer in self.layers:
            x = layer(x)
        return x.cpu()


class Rank:
    """The stages of one rank under one schedule, and its share of the batch."""

    def __init__(self, name: str, rank: int, world: int, microbatches: int) -> None:
        self.numbers = plans(name, ranks=world, microbatches=microbatches)[rank].stages
        self.total = world * len(self.numbers)
        self.modules = [Stage(number, LAYERS // len(self.numbers)) for number in self.numbers]
        stages: Any = [
            PipelineStage(module, number, self.total, torch.device("cpu"))
            for module, number in zip(self.modules, self.numbers)
        ]
        for module in self.modules:
            module.cuda()
        kind = getattr(torch_schedules, f"Schedule{name}")
        self.schedule = kind(
            stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=nn.functional.mse_loss
        )
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(microbatches * ROWS, WIDTH, generator=generator) for _ in range(2))

    def step(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        first = [self.x] if 0 in self.numbers else []
        last = {"target": self.y, "losses": losses} if self.total - 1 in self.numbers else {}
        self.schedule.step(*first, **last)
        return losses

    def peak(self, around: Any, steps: int) -> tuple[int, list[float]]:
        """Bytes at the peak of the last of some steps, above those before it; and its losses."""
        for _ in range(steps):
            for module in self.modules:
                module.zero_grad(set_to_none=False)  # so that gradients are there before and after
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with around():
                losses = self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, [loss.item() for loss in losses]


def promised(plan: Plan) -> int:
    """What the peak should fall by, from the schedule alone."""
    layer = 5 * WIDTH * ROWS * 4  # its input, and two tensors of twice the width
    microbatch = LAYERS // len(plan.stages) * layer
    saved = max(sum(counts.values()) for counts in plan.held())
    at_once = immediate_backwards(plan)
    comes_and_goes = (
        1 if kind == "F" else -1 for kind, stage, number in plan.actions if (stage, number) in at_once
    )
    staying = max(accumulate(comes_and_goes), default=0)
    return 0 if saved == staying else microbatch * (saved - staying) - WINDOW * layer


def work(rank: int, world: int, folder: str, microbatches: int) -> None:
    """Each schedule without a keeper and with one that offloads; peaks, and the bytes that left."""
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    found: dict[str, Any] = {}
    for name in SCHEDULES:
        here = Rank(name, rank, world, microbatches)
        kept, right = here.peak(nullcontext, 2)
        keeper = Keeper(Policy([Rule("layers.*", "offload")]))
        for module in here.modules:
            keeper.attach(module)
        keeper.follow(here.schedule)
        less, losses = here.peak(keeper.step, 3)
        found[name] = {
            "kept_bytes": kept,
            "offload_bytes": less,
            "promised_bytes": promised(plans(name, ranks=world, microbatches=microbatches)[rank]),
            "host_bytes": keeper.stats().homes["offload"].peak,
            "same_losses": losses == right,
        }
        keeper.detach()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure every rank, claim for the first and the last, and write the result."""
    world = 2 if quick else 4
    microbatches = 2 * world
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world, folder, microbatches), nprocs=world)
        found = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]
    rows, claims = [], []
    for name in SCHEDULES:
        for rank in range(world):
            row = {"schedule": name, "rank": rank, **found[rank][name]}
            if not row["same_losses"]:
                raise RuntimeError(f"{name}, rank {rank}: offload changed the losses")
            rows.append(row)
            print(
                f"{name:16} rank {rank}: {row['kept_bytes'] / MIB:8.1f} MiB kept, "
                f"{row['offload_bytes'] / MIB:8.1f} with offload, {row['promised_bytes'] / MIB:8.1f} less promised"
            )
            if rank in (0, world - 1):
                claims.append(_claim(name, rank, world, row))
    config = {
        "ranks": world,
        "microbatches": microbatches,
        "width": WIDTH,
        "rows": ROWS,
        "layers_a_rank": LAYERS,
    }
    return write("pipeline_gpu", config=config, rows=rows, claims=claims, out=out)


def _claim(name: str, rank: int, world: int, row: dict[str, Any]) -> Claim:
    where = f"offload under {name}, {'first' if rank == 0 else 'last'} of {world} ranks on one GPU"
    kept, less, fall = row["kept_bytes"], row["offload_bytes"], row["promised_bytes"]
    if not fall:
        what = f"{where} (every backward comes at once, nothing is moved): peak over keep"
        return Claim(what=what, value=round(less / kept, 4), bar=1.0, better="at most")
    what = f"{where}: fall of the peak over the {fall / MIB:,.0f} MiB that its schedule implies"
    return Claim(what=what, value=round((kept - less) / fall, 4), bar=0.99, better="at least")
