"""A training step of one expert-parallel rank, simulated on one GPU: rows that vary, in buffers that do not.

    python -m benchmarks.moe_step --preset qwen3

Routed rows vary from layer to layer and step to step between 0.6 and 1.4 of the average, experts are skewed,
the source of each row is random, and capacity is 4 times the average. The gather from the residual stream
stands for the wire: what arrives is kept for backward, never gathered again. Compared are exact-shape eager
code, which has to read the number of rows on the host; the library's layer in a CUDA graph with buffers of
full capacity kept (`kept`); and the same with 1.25 times the average expected, which stays, and the valid rows
beyond it stashed in pages (`stashed`).

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
from pagestash.kernels.moe.grouped import grouped_mm
from pagestash.kernels.moe.route import Routing
from pagestash.moe import ExpertFC1, ExpertFC2, Experts, MoEAct, MoEConfig, Received
from pagestash.pages.pool import PagePool

GIB = 1 << 30
EXACT, KEPT, STASHED = WAYS = ("exact, eager", "kept, graph", "stashed, graph")
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
    expected: float = 1.25  # both times the average

    @property
    def average(self) -> int:
        return self.tokens * self.top_k

    @property
    def buffer(self) -> int:
        return self.capacity * self.average

    @property
    def expected_rows(self) -> int:
        """Rows that usually arrive: they stay where they are."""
        return int(self.expected * self.average)


PRESETS = {
    "qwen3": Preset(tokens=8192, width=2048, inner=768, top_k=8, experts=16, layers=12),
    "dsv3": Preset(tokens=4096, width=7168, inner=2048, top_k=8, experts=8, layers=6),
}


@dataclass
class Batch:
    """What the wire brings in one step, for every layer [L, ...]."""

    offsets: torch.Tensor  # int32 [L, E]
    order: torch.Tensor  # int32 [L, buffer]: the place of each row
    inverse: torch.Tensor  # int32 [L, T, PLACES]: the row of each place of a token, or -1
    weights: torch.Tensor  # float32 [L, T, PLACES]
    # The same for the code that indexes by rows.
    source: torch.Tensor  # int64 [L, PLACES × T]: the token of each row
    row_weights: torch.Tensor  # [L, PLACES × T]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.offsets, self.order, self.inverse, self.weights, self.source, self.row_weights

    def routing(self, layer: int) -> Routing:
        offsets = self.offsets[layer]
        return Routing(offsets, offsets, self.order[layer], self.inverse[layer])


def draw(preset: Preset, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Batch:
    layers, places = preset.layers, preset.tokens * PLACES
    inverse = torch.full((layers, places), -1, dtype=torch.int32, device=device)
    order = torch.zeros(layers, preset.buffer, dtype=torch.int32, device=device)
    offsets = torch.empty(layers, preset.experts, dtype=torch.int32, device=device)
    weights = torch.rand(layers, places, device=device)
    for layer in range(layers):
        count = int((0.6 + 0.8 * torch.rand(())) * preset.average)
        chosen = torch.randperm(places, device=device)[:count]
        order[layer, :count] = chosen
        inverse[layer, chosen] = torch.arange(count, dtype=torch.int32, device=device)
        share = torch.softmax(torch.randn(preset.experts), 0).cumsum(0)
        ends = (share * count).round().int()
        ends[-1] = count
        offsets[layer] = ends
    placed = order[:, :places].to(torch.int64)
    return Batch(
        offsets,
        order,
        inverse.view(layers, preset.tokens, PLACES),
        weights.view(layers, preset.tokens, PLACES),
        placed // PLACES,
        weights.gather(1, placed).to(dtype),
    )


class Wire:
    """A dispatch that has brought the rows of a drawn batch: the residual stream is what arrived."""

    def __init__(self, preset: Preset) -> None:
        self.experts, self.capacity, self.expected_rows = preset.experts, preset.buffer, 0
        self.routing: Routing | None = None

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        assert self.routing is not None
        return Received(x, weights, ids, self.routing, self.expected_rows)

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        return slots

    def grow_capacity(self, *, headroom: float, alignment: int) -> bool:
        return False


class Stack:
    """Layers of experts on a residual stream, in the ways that are compared."""

    def __init__(self, preset: Preset, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        made: Any = {"device": device, "dtype": dtype}
        # The experts here are those of one rank in eight.
        config = MoEConfig(
            width=preset.width,
            expert_width=preset.inner,
            experts=8 * preset.experts,
            top_k=preset.top_k,
            capacity=preset.buffer,
        )
        self.preset = preset
        self.layers, self.up, self.down = [], [], []
        for _ in range(preset.layers):
            fc1 = ExpertFC1(preset.experts, preset.inner, preset.width, wired=True, **made)
            fc2 = ExpertFC2(preset.experts, preset.width, preset.inner, **made)
            for part in (fc1, fc2):
                part.weight.data.mul_(0.5)
            self.up.append(fc1.weight)
            self.down.append(fc2.weight)
            self.layers.append(Experts(config, (fc1, MoEAct(), fc2), dispatch=Wire(preset), device=device))
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
            rows = rows * batch.row_weights[layer, :count, None]
            x = x + torch.zeros_like(x).index_add(0, source, rows)
        return x

    def padded(self, batch: Batch, pool: PagePool | None, expected: int) -> torch.Tensor:
        """The library's experts on buffers of full capacity; rows beyond `expected` are kept or stashed."""
        x = self.x.detach().requires_grad_()
        for layer, experts in enumerate(self.layers):
            experts.use_pool(pool)
            wire = experts.dispatch
            wire.routing, wire.expected_rows = batch.routing(layer), expected
            # The routing is drawn, so nobody asks who was chosen; anything of the ids' shape will do.
            x = x + experts(x, batch.weights[layer], batch.inverse[layer])
        return x

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.drop_gradients()
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
    """Pages for the rows and first projections of the fullest step, as far as they exceed those expected."""
    most = 0
    for batch in batches:
        rows = (batch.offsets[:, -1] - preset.expected_rows).clamp(min=0).tolist()
        row_bytes = (2 * preset.width, 4 * preset.inner)
        most = max(most, sum(-(-r * size // page_bytes) for r in rows for size in row_bytes))
    return most


class Run:
    """One way to run the step, ready to be called with a batch."""

    def __init__(self, preset: Preset, way: str, stack: Stack, batches: list[Batch]) -> None:
        self.pool: PagePool | None = None
        self._stack, self._graph = stack, None
        self._gradients: list[torch.Tensor | None] = []
        if way == EXACT:
            return
        if way == STASHED:
            self.pool = PagePool("cuda", device_pages=int(pages_wanted(preset, batches) * 1.02) + 1)
        expected = preset.expected_rows if way == STASHED else 0
        self._static = Batch(*(t.clone() for t in batches[0].tensors()))

        def step() -> None:
            stack.step(lambda: stack.padded(self._static, self.pool, expected))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        stack.drop_gradients()
        _tidy()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()
        # Its own in every replay, whoever runs in between.
        self._gradients = [parameter.grad for parameter in stack.parameters]

    @property
    def gradients(self) -> list[torch.Tensor]:
        made = self._gradients or [parameter.grad for parameter in self._stack.parameters]
        return [gradient for gradient in made if gradient is not None]

    def __call__(self, batch: Batch) -> None:
        if self._graph is None:
            self._stack.step(lambda: self._stack.exact(batch))
        else:
            # What only exact code reads comes last, and stays behind.
            for to, of in zip(self._static.tensors()[:4], batch.tensors()):
                to.copy_(of)
            self._graph.replay()


def _tidy() -> None:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def measure(preset: Preset, way: str, stack: Stack, batches: list[Batch]) -> dict[str, Any]:
    """The memory of one way, alone on the device, over all batches; and what it computed from the last."""
    stack.drop_gradients()
    _tidy()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = Run(preset, way, stack, batches)
    for batch in batches:
        run(batch)
    torch.cuda.synchronize()
    held, peak = torch.cuda.memory_reserved() - before, torch.cuda.max_memory_allocated() - before
    norms = [float(gradient.float().norm()) for gradient in run.gradients]
    row = {
        "way": way,
        "held_gib": held / GIB,
        "peak_gib": peak / GIB,
        "gradient_norm": sum(n * n for n in norms) ** 0.5,
        "pool_gib": 0.0 if run.pool is None else run.pool.stats().device.bytes / GIB,
        "overflow": False if run.pool is None else bool(run.pool.overflow),
    }
    stack.drop_gradients()
    return row


ROUNDS = 3
"""Over all batches. Clocks drift: the same code gave ratios of 1.01 to 1.05 by one round, 1.02 to 1.03 by three."""


def timed_in_turns(runs: dict[str, Run], batches: list[Batch], warm: int) -> dict[str, float]:
    """The median step of each way in ms, over batches that all differ.

    Each batch goes through all ways before the next, so that all see the device as warm. A step also depends on the
    one before it: products this large lower the clock, and where the device waited it is higher. So each way runs a
    batch twice, and the second run counts.
    """
    samples: dict[str, list[float]] = {way: [] for way in runs}
    for index, batch in enumerate(batches * ROUNDS):
        for way, run in runs.items():
            run(batch)
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(batch)
            torch.cuda.synchronize()
            if index >= warm:
                samples[way].append((time.perf_counter() - start) * 1e3)
    return {way: statistics.median(taken) for way, taken in samples.items()}


def compare(name: str, steps: int, warm: int) -> tuple[list[dict[str, Any]], list[Claim]]:
    preset = PRESETS[name]
    torch.manual_seed(0)
    device = torch.device("cuda")
    stack = Stack(preset, device)
    batches = [draw(preset, device) for _ in range(steps + warm)]
    rows = [{"preset": name} | measure(preset, way, stack, batches) for way in WAYS]
    _tidy()
    ms = timed_in_turns({way: Run(preset, way, stack, batches) for way in WAYS}, batches, warm)
    for row in rows:
        row["ms"] = ms[row["way"]]
        print(
            "  " + ", ".join(f"{k} {v:,.2f}" if isinstance(v, float) else str(v) for k, v in row.items()),
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
