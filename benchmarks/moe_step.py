"""A training step of one expert-parallel rank, simulated on one GPU: rows that vary, in buffers that do not.

    python -m benchmarks.moe_step --preset qwen3

Routed rows vary from layer to layer and step to step between 0.6 and 1.4 of the average, experts are skewed,
the source of each row is random, and capacity is 4 times the average. The gather from the residual stream
stands for the wire: what arrives is kept for backward, never gathered again. Compared are exact-shape eager
code, which has to read the number of rows on the host; the library's layer in a CUDA graph with buffers of
full capacity kept (`kept`); and the same with valid rows stashed in pages (`stashed`).

`held` is the memory reserved from the driver above weights and batch data, after all steps.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import Claim, write
from pagestash.kernels.gather import combine, spread
from pagestash.moe.block import BlockOptions, Place, ReceivedExperts
from pagestash.moe.grouped import grouped_mm
from pagestash.moe.lease import Lease
from pagestash.pages.pool import PagePool

GIB = 1 << 30
PLACES = 12  # rows a token may have here: more than 1.4 × 8, so that any source fits


@dataclass(frozen=True, kw_only=True)
class Preset:
    tokens: int
    width: int
    inner: int
    top_k: int
    experts: int
    layers: int
    capacity: int = 4

    @property
    def average(self) -> int:
        return self.tokens * self.top_k

    @property
    def buffer(self) -> int:
        return self.capacity * self.average


PRESETS = {
    "qwen3": Preset(tokens=8192, width=2048, inner=768, top_k=8, experts=16, layers=12),
    "dsv3": Preset(tokens=4096, width=7168, inner=2048, top_k=8, experts=8, layers=6),
}


@dataclass
class Batch:
    """What the wire brings in one step, for every layer [L, ...]."""

    inverse: torch.Tensor  # int32 [L, T, PLACES]: the row of each place of a token, or -1
    offsets: torch.Tensor  # int32 [L, E]
    weights: torch.Tensor  # float32 [L, buffer]
    source: torch.Tensor  # int64 [L, PLACES × T]: the token of each row, for the code that indexes by rows

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.inverse, self.offsets, self.weights, self.source


def draw(preset: Preset, device: torch.device) -> Batch:
    places = preset.tokens * PLACES
    inverse = torch.full((preset.layers, places), -1, dtype=torch.int32, device=device)
    offsets = torch.empty(preset.layers, preset.experts, dtype=torch.int32, device=device)
    source = torch.empty(preset.layers, places, dtype=torch.int64, device=device)
    for layer in range(preset.layers):
        count = int((0.6 + 0.8 * torch.rand(())) * preset.average)
        chosen = torch.randperm(places, device=device)[:count]
        source[layer, :count] = chosen // PLACES
        inverse[layer, chosen] = torch.arange(count, dtype=torch.int32, device=device)
        share = torch.softmax(torch.randn(preset.experts), 0).cumsum(0)
        ends = (share * count).round().int()
        ends[-1] = count
        offsets[layer] = ends
    weights = torch.rand(preset.layers, preset.buffer, device=device)
    return Batch(inverse.view(preset.layers, preset.tokens, PLACES), offsets, weights, source)


class Wire(torch.autograd.Function):
    """Rows arrive in expert order; their gradients go back to their tokens."""

    @staticmethod
    def forward(ctx, x, inverse, buffer, lease):
        ctx.save_for_backward(inverse)
        return spread(x, inverse, buffer, pages=lease.pages if lease else None)

    @staticmethod
    def backward(ctx, drows):
        return combine(drows, *ctx.saved_tensors), None, None, None


class Back(torch.autograd.Function):
    """Results return to their tokens, onto the residual stream."""

    @staticmethod
    def forward(ctx, rows, inverse, residual):
        ctx.save_for_backward(inverse)
        ctx.buffer = rows.shape[0]
        return combine(rows, inverse, added=residual)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        return spread(dy, *ctx.saved_tensors, ctx.buffer), None, dy


class Stack:
    """Layers of experts on a residual stream, in the ways that are compared."""

    def __init__(self, preset: Preset, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        def weight(*shape: int) -> torch.Tensor:
            value = torch.randn(shape, device=device, dtype=dtype) * (0.5 * shape[-1] ** -0.5)
            return value.requires_grad_()

        self.preset = preset
        self.up = [weight(preset.experts, 2 * preset.inner, preset.width) for _ in range(preset.layers)]
        self.down = [weight(preset.experts, preset.width, preset.inner) for _ in range(preset.layers)]
        self.x = torch.randn(preset.tokens, preset.width, device=device, dtype=dtype)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return self.up + self.down

    def exact(self, batch: Batch) -> torch.Tensor:
        """What is usually written: shapes as large as what arrived, which the host has to know."""
        x = self.x.detach().requires_grad_()
        for layer in range(self.preset.layers):
            offsets = batch.offsets[layer]
            count = int(offsets[-1])  # the host waits here
            source = batch.source[layer, :count]
            multiply = F.grouped_mm if x.is_cuda else lambda a, b, offs: _DifferentiableMM.apply(a, b, offs)
            h = multiply(x[source], self.up[layer].transpose(-2, -1), offs=offsets)
            gate, linear = h.chunk(2, dim=1)
            rows = multiply(F.silu(gate) * linear, self.down[layer].transpose(-2, -1), offs=offsets)
            rows = rows * batch.weights[layer, :count, None].to(rows.dtype)
            x = x + torch.zeros_like(x).index_add(0, source, rows)
        return x

    def padded(self, batch: Batch, pool: PagePool | None) -> torch.Tensor:
        """The library's block on buffers of full capacity, kept or stashed."""
        x = self.x.detach().requires_grad_()
        options = BlockOptions(h=Place(pool=pool))
        buffer = self.preset.buffer
        for layer in range(self.preset.layers):
            offsets, inverse = batch.offsets[layer], batch.inverse[layer]
            lease = None
            if pool is not None:
                lease = Lease(pool, (buffer, self.preset.width), x.dtype, offsets[-1:])
            rows = Wire.apply(x, inverse, buffer, lease)
            rows = ReceivedExperts.apply(
                rows,
                batch.weights[layer],
                self.up[layer],
                self.down[layer],
                None,
                None,
                offsets,
                lease,
                options,
            )
            x = Back.apply(rows, inverse, x)
            del rows, lease
        return x

    def step(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        loss = forward().float().square().mean()
        loss.backward()
        return loss.detach()


class _DifferentiableMM(torch.autograd.Function):
    """`F.grouped_mm` where there is no GPU, for the test that the ways agree."""

    @staticmethod
    def forward(ctx, a, b, offsets):
        ctx.save_for_backward(a, b, offsets)
        return grouped_mm(a, b, offsets)

    @staticmethod
    def backward(ctx, dy):
        a, b, offsets = ctx.saved_tensors
        return grouped_mm(dy, b.transpose(-2, -1), offsets), grouped_mm(a.t(), dy, offsets), None


def pages_wanted(preset: Preset, batches: list[Batch], page_bytes: int = 65536) -> int:
    """Pages for the rows and first projections of the fullest step."""
    most = 0
    for batch in batches:
        rows = batch.offsets[:, -1].tolist()
        row_bytes = (2 * preset.width, 4 * preset.inner)
        most = max(most, sum(-(-r * size // page_bytes) for r in rows for size in row_bytes))
    return most


def timed(step: Callable[[Batch], Any], batches: list[Batch], warm: int) -> float:
    """The median step in ms, over batches that all differ."""
    samples = []
    for index, batch in enumerate(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(batch)
        torch.cuda.synchronize()
        if index >= warm:
            samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def measure(preset: Preset, way: str, stack: Stack, batches: list[Batch], warm: int) -> dict[str, Any]:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pool, graph = None, None
    if way == "exact, eager":

        def step(batch: Batch) -> None:
            stack.step(lambda: stack.exact(batch))

    else:
        if way == "stashed, graph":
            pool = PagePool("cuda", device_pages=int(pages_wanted(preset, batches) * 1.02) + 1)
        static = Batch(*(t.clone() for t in batches[0].tensors()))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            stack.step(lambda: stack.padded(static, pool))
        torch.cuda.current_stream().wait_stream(side)
        for parameter in stack.parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stack.step(lambda: stack.padded(static, pool))

        def step(batch: Batch) -> None:
            for to, of in zip(static.tensors()[:3], batch.tensors()):
                to.copy_(of)
            graph.replay()

    ms = timed(step, batches, warm)
    held = torch.cuda.memory_reserved() - before
    # The last batch is the same in every way, so its gradients can be compared.
    norms = [float(p.grad.float().norm()) for p in stack.parameters if p.grad is not None]
    row = {
        "way": way,
        "ms": ms,
        "held_gib": held / GIB,
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB,
        "gradient_norm": sum(n * n for n in norms) ** 0.5,
        "pool_gib": 0.0 if pool is None else pool.stats().device.bytes / GIB,
        "overflow": False if pool is None else bool(pool.overflow),
    }
    for parameter in stack.parameters:
        parameter.grad = None
    return row


def compare(name: str, steps: int, warm: int) -> tuple[list[dict[str, Any]], list[Claim]]:
    preset = PRESETS[name]
    torch.manual_seed(0)
    device = torch.device("cuda")
    stack = Stack(preset, device)
    batches = [draw(preset, device) for _ in range(steps + warm)]
    rows = []
    for way in ("exact, eager", "kept, graph", "stashed, graph"):
        rows.append({"preset": name} | measure(preset, way, stack, batches, warm))
        print(
            "  "
            + ", ".join(f"{k} {v:,.2f}" if isinstance(v, float) else str(v) for k, v in rows[-1].items()),
            flush=True,
        )
    exact, kept, stashed = rows
    claims = [
        Claim(
            what=f"MoE step, {name}: stashed in a graph over exact-shape eager, time",
            value=round(stashed["ms"] / exact["ms"], 4),
            bar=0.80,
            better="at most",
        ),
        Claim(
            what=f"MoE step, {name}: stashed in a graph over exact-shape eager, held bytes",
            value=round(stashed["held_gib"] / exact["held_gib"], 4),
            bar=0.80,
            better="at most",
        ),
        Claim(
            what=f"MoE step, {name}: stash on over off, same graph, time",
            value=round(stashed["ms"] / kept["ms"], 4),
            bar=1.03,
            better="at most",
        ),
    ]
    return rows, claims


def run(out: Path | None = None, quick: bool = False, presets: list[str] | None = None) -> Path:
    """Measure, write the result file, and return its path; about a minute on an H200."""
    if not torch.cuda.is_available():
        raise SystemExit("moe_step: needs a CUDA GPU")
    steps, warm = (6, 2) if quick else (16, 4)
    rows, claims = [], []
    for name in presets or list(PRESETS):
        print(f"moe_step: {name}", flush=True)
        more_rows, more_claims = compare(name, steps, warm)
        rows += more_rows
        claims += more_claims
    return write(
        "moe_step",
        config={"steps": steps, "capacity": 4, "rows": [0.6, 1.4]},
        rows=rows,
        claims=claims,
        out=out,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", choices=list(PRESETS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print(run(given.out, given.quick, given.preset))
