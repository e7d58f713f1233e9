"""Peak saved bytes on each rank of a pipeline, against what the schedule implies; and the timeline.

On CPUs, over gloo. A stage is a stack of small layers whose saved tensors are kept; the keeper counts them, action
by action. What a schedule implies is a sum over its plan: the bytes of one microbatch of a stage after its forward,
and after the first half of a split backward, for every microbatch it holds. Both are to be equal to the byte.
"""

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward_input

from benchmarks.harness import Claim, write
from pagestash import Keeper, Policy, Rule
from pagestash.pipeline import SCHEDULES, Action, Observation, Plan, plans

WIDTH, ROWS, LAYERS = 64, 8, 3
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#eeca3b", "W": "#54a24b"}


class Stage(nn.Module):
    """Layers whose backward needs their input and their activation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()  # a part of the batch would be counted as the whole of it
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, target.clone())


class Diary:
    """When each action ran, and what the keeper held when it was over."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.lines, self._begun = keeper, [], 0.0

    def begin_step(self, plan: Plan) -> None:
        self.lines.clear()

    def end_step(self) -> None:
        pass

    def begin(self, action: Action) -> None:
        self._begun = time.time()

    def end(self, action: Action) -> None:
        self.lines.append((tuple(action), self._begun, time.time(), int(self.keeper.held()["keep"])))


def work(rank: int, world: int, folder: str, microbatches: dict[str, int]) -> None:
    """Two steps under every schedule on this rank; the second is written down."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    found = {}
    for name, count in microbatches.items():
        numbers = plans(name, ranks=world, microbatches=count)[rank].stages
        total = world * len(numbers)
        stages: Any = [PipelineStage(Stage(n), n, total, torch.device("cpu")) for n in numbers]
        kind = getattr(torch_schedules, f"Schedule{name}")
        schedule = kind(stages[0] if len(stages) == 1 else stages, count, loss_fn=loss_of)
        keeper = Keeper(Policy([Rule("*", "keep")]))
        for stage in stages:
            keeper.attach(stage.submod)
        keeper.follow(schedule)
        diary = Diary(keeper)
        Observation(schedule, diary)
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(count * ROWS, WIDTH, generator=generator) for _ in range(2))
        for _ in range(2):
            keeper.reset_peaks()
            with keeper.step():
                first = [x] if 0 in numbers else []
                last = {"target": y} if total - 1 in numbers else {}
                schedule.step(*first, **last)
        found[name] = {"peak": keeper.stats().homes["keep"].peak, "lines": list(diary.lines)}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def sizes(number: int, last: bool) -> tuple[int, int]:
    """Bytes that a microbatch of a stage holds after its forward, and after half of its backward."""
    model, keeper = Stage(number), Keeper(Policy([Rule("*", "keep")]))
    keeper.attach(model)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with keeper.step(check=False):
        out = model(x)
        if last:
            out = loss_of(out, torch.zeros(ROWS, WIDTH))
        full = int(keeper.held()["keep"])
        if number == 0:
            return full, full  # its whole backward is the second half
        _, groups = stage_backward_input(
            [out], None if last else [torch.ones_like(out)], [x], model.parameters()
        )
        half = int(keeper.held()["keep"])
        del groups
    return full, half


def implied(plan: Plan, total: int) -> int:
    """The peak that follows from a rank's plan."""
    known = {number: sizes(number, number == total - 1) for number in plan.stages}
    held: dict[tuple[int, int], int] = {}
    most = 0
    for kind, stage, microbatch in plan.actions:
        held[stage, microbatch] = {"F": known[stage][0], "I": known[stage][1]}.get(kind, 0)
        most = max(most, sum(held.values()))
    return most


def draw(name: str, ranks: list[list[Any]], path: Path) -> None:
    """Actions over time, a row a rank, and beneath each row the bytes that it holds."""
    begun = min(line[1] for lines in ranks for line in lines)
    scale = 1400 / (max(line[2] for lines in ranks for line in lines) - begun)
    most = max(line[3] for lines in ranks for line in lines)
    parts = []
    for rank, lines in enumerate(ranks):
        top = 30 + rank * 70
        parts.append(f'<text x="4" y="{top + 16}">{rank}</text>')
        steps = [f"M24 {top + 60}"]
        for (kind, stage, microbatch), start, end, held in lines:
            x, width = 24 + (start - begun) * scale, max(1.0, (end - start) * scale)
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="24" fill="{COLOURS[kind]}">'
                f"<title>{stage}{kind}{microbatch}</title></rect>"
            )
            steps.append(f"H{x + width:.1f} V{top + 60 - 30 * held / most:.1f}")
        parts.append(f'<path d="{" ".join(steps)}" fill="none" stroke="#333"/>')
    height = 40 + 70 * len(ranks)
    legend = "  ".join(f'<tspan fill="{colour}">{kind}</tspan>' for kind, colour in COLOURS.items())
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1440 {height}" font-family="sans-serif" '
        f'font-size="13" fill="#222"><rect width="1440" height="{height}" fill="#fff"/>'
        f'<text x="24" y="18">{name}: actions of each rank, bytes held beneath  {legend}</text>'
        f"{''.join(parts)}</svg>\n"
    )


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure, draw a timeline for each schedule beside the result, and write the result."""
    world = 2 if quick else 4
    microbatches = dict.fromkeys(SCHEDULES, 3 * world)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world, folder, microbatches), nprocs=world)
        found = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]
    rows, worst = [], 0
    for name, count in microbatches.items():
        every = plans(name, ranks=world, microbatches=count)
        total = sum(len(plan.stages) for plan in every)
        for rank, plan in enumerate(every):
            peak, expected = found[rank][name]["peak"], implied(plan, total)
            worst = max(worst, abs(peak - expected))
            rows.append({"schedule": name, "rank": rank, "peak_bytes": peak, "implied_bytes": expected})
            print(f"{name:22} rank {rank}: {peak:8,} bytes at the peak, {expected:8,} implied")
    claims = [
        Claim(
            what=f"bytes between the peak of a pipeline's rank and what its schedule implies, {world} ranks",
            value=worst,
            bar=0,
            better="at most",
            unit="bytes",
        )
    ]
    config = {"ranks": world, "microbatches": 3 * world, "width": WIDTH, "rows": ROWS, "layers": LAYERS}
    path = write("pipeline", config=config, rows=rows, claims=claims, out=out)
    for name in SCHEDULES:
        draw(name, [ranks[name]["lines"] for ranks in found], path.parent / f"pipeline-{name}.svg")
    return path
