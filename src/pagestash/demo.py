"""`pagestash demo`: a stack of layers with worst-case buffers, trained with and without the stash.

The number of valid rows changes from layer to layer and step to step and is known to the device alone; every
buffer has room for four times the average. What is kept until backward is the whole buffer without the stash,
and the valid rows with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from pagestash.policy import Policy, PoolConfig, Rule, format_bytes
from pagestash.saved.keeper import Keeper
from pagestash.saved.region import region
from pagestash.step.graphed import GraphedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The stack's shape; `spread` is how far row counts go from the average, up and down."""

    steps: int = 12
    layers: int = 6
    width: int = 192
    capacity: int = 4096
    over: int = 4
    spread: float = 0.4
    seed: int = 0


class GatedRows(nn.Module):
    """A gated projection of the first `rows` rows of a buffer; the rows behind them are nobody's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with region(rows=rows, capacity=x.shape[0]):
            gate, value = self.up(x).chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * value)


class RowStack(nn.Module):
    """Layers that each see another number of valid rows; the loss counts rows that are valid in all."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedRows(config.width) for _ in range(config.layers))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for layer, count in zip(self.layers, rows):
            x = layer(x, count)
        valid = torch.arange(x.shape[0], device=x.device) < rows.min()
        return torch.where(valid[:, None], x - 1.0, 0.0).square().sum() / (rows.min() * x.shape[1])


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What one training run leaves: its losses, and the bytes that waited for backward."""

    losses: list[float]
    kept: int
    stashed: int
    pool: int
    reruns: int


def train(config: DemoConfig, policy: Policy, device: str, tick: Any = None) -> DemoRun:
    """Train the stack under `policy`; `tick(loss)` is called after each step."""
    torch.manual_seed(config.seed)
    model = RowStack(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    keeper = Keeper(policy).attach(model)

    def train_step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        loss = model(x, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = GraphedStep(train_step, keeper, optimizer=optimizer)
    generator = torch.Generator().manual_seed(config.seed)
    losses, stashed = [], 0
    for _ in range(config.steps):
        share = 1 + config.spread * (2 * torch.rand(config.layers, generator=generator) - 1)
        rows = (share * config.capacity / config.over).to(torch.int64)
        x = torch.randn(config.capacity, config.width, generator=generator)
        loss = step(x.to(device), rows.to(device))
        step.wait()
        losses.append(float(loss))
        stashed = max(stashed, keeper.stats().homes["stash"].peak)
        if tick is not None:
            tick(losses[-1])
    stats = keeper.stats()
    pool = 0 if stats.pool is None else stats.pool.device.bytes
    keeper.detach()
    return DemoRun(losses, stats.homes["keep"].peak, stashed, pool, step.reruns)


def policies() -> dict[str, Policy]:
    """The two runs that the demo compares."""
    pool = PoolConfig(page="16KiB")
    return {
        "no stash": Policy([Rule("layers.*", "keep")], pool),
        "stash": Policy([Rule("layers.*", "stash")], pool),
    }


def main(config: DemoConfig) -> bool:
    """Run both, show the table; False if a loss differs in a single bit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    console.print(
        f"{config.layers} layers, {config.capacity:,} rows of {config.width} in every buffer, about "
        f"{config.capacity // config.over:,} of them valid; {config.steps} steps on {device}"
    )
    runs = {}
    columns = [TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        for name, policy in policies().items():
            task = progress.add_task(name, total=config.steps, loss="…")

            def tick(loss: float, task: Any = task) -> None:
                progress.update(task, advance=1, loss=f"{loss:.6f}")

            runs[name] = train(config, policy, device, tick)
    table = Table(title="bytes kept until backward, at the peak of a step")
    for heading in ("", "kept", "stashed", "together", "pool", "last loss"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, result in runs.items():
        table.add_row(
            name,
            format_bytes(result.kept),
            format_bytes(result.stashed),
            format_bytes(result.kept + result.stashed),
            format_bytes(result.pool) if result.pool else "–",
            f"{result.losses[-1]:.9g}",
        )
    console.print(table)
    plain, stash = runs.values()
    equal = plain.losses == stash.losses
    ratio = (stash.kept + stash.stashed) / (plain.kept + plain.stashed)
    console.print(
        f"Losses of all {config.steps} steps are equal to the last bit: {'yes' if equal else 'NO'}. "
        f"Bytes kept until backward: {ratio:.2f} of before."
    )
    return equal
