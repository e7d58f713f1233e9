"""Memory of a 12-layer stack with capacity 4x the average rows, in a CUDA graph, with and without the stash."""

import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import pagestash as ps
from benchmarks.harness import Claim, write

LAYERS, CAPACITY, WIDTH = 12, 65536, 2048
AVERAGE = 4  # capacity over the average number of valid rows


class Experts(nn.Module):
    """A gated projection over buffers of worst-case length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(ps.rows(x, rows)).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * value)
        # The next layer may have more rows: those past this one's must not reach it as garbage.
        return torch.where((torch.arange(len(y), device=y.device) < rows)[:, None], y, 0.0)


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(width) for _ in range(layers))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for layer, count in zip(self.layers, rows):
            x = layer(x, count)
        return x.square().mean()


def measure(layers: int, capacity: int, width: int, stash: bool, steps: int = 12) -> dict[str, Any]:
    """Held bytes above the weights and time of a graphed step; rows vary by layer and step."""
    row = _measure(layers, capacity, width, stash, steps)
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _measure(layers: int, capacity: int, width: int, stash: bool, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Stack(layers, width).to(device="cuda", dtype=torch.bfloat16)
    home: Any = "stash" if stash else "keep"
    keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*", home)])).attach(model)

    def train_step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        loss = model(x, rows)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    generator = torch.Generator().manual_seed(1)
    average = capacity // AVERAGE

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = (average * (0.6 + 0.8 * torch.rand(layers, generator=generator))).to(torch.int64)
        return torch.zeros(capacity, width, device="cuda", dtype=torch.bfloat16).normal_(), rows.cuda()

    batches = [batch() for _ in range(2)]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    step = ps.GraphedStep(train_step, keeper)
    times = []
    for number in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(*batches[number % 2])
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        if number == 2:  # warmed up and captured: what is held from here on is the graph's
            gc.collect()
            torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    keeper.detach()
    return {
        "stash": stash,
        "held_bytes": held,
        "step_ms": sorted(times[4:])[len(times[4:]) // 2],
        "reruns": step.reruns,
        "pool_bytes": 0 if keeper.pool is None else keeper.pool.device_pages * keeper.pool.page_bytes,
    }


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure both and write the result."""
    layers, capacity, width = (4, 16384, 1024) if quick else (LAYERS, CAPACITY, WIDTH)
    rows = [measure(layers, capacity, width, stash) for stash in (False, True)]
    for row in rows:
        print(f"stash={row['stash']}: {row['held_bytes'] / 2**30:.2f} GiB held, {row['step_ms']:.2f} ms")
    ratio = rows[1]["held_bytes"] / rows[0]["held_bytes"]
    claim = Claim(
        what=f"held bytes of a {layers}-layer stack in a CUDA graph, capacity 4x, with the stash over without",
        value=round(ratio, 4),
        bar=0.45,
        better="at most",
    )
    config = {"layers": layers, "capacity": capacity, "width": width, "dtype": "bfloat16", "average": AVERAGE}
    return write("graphed_stack", config=config, rows=rows, claims=[claim], out=out)
