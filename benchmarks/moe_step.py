"""A training step of one expert-parallel rank, simulated on one GPU: rows that vary, in buffers that do not.

    python -m benchmarks.moe_step --preset qwen3

Each layer is a `MoE` with a dispatch. The dispatch stands for the wire: it brings drawn rows of the residual
stream, which are kept for backward, never gathered again. The router runs, and its weights are those of the rows.
Experts are skewed, the source of each row is random, and capacity is 4 times the average. Received rows vary from
layer to layer and step to step:

| preset | rows over the average |
| --- | --- |
| qwen3, dsv3 | between 0.6 and 1.4 |
| skewed | log-normal over the layers; in every step the fullest layer has 3, and all have 1 on average |

Three ways run the same step, optimizer included: exact-shape eager code, which has to read the number of rows on
the host (`exact`); the layers in buffers of full capacity, kept, under `GraphedStep` (`kept`); and the same with a
stash rule for the experts and `expected_rows="auto"` (`stashed`). A preset with a bar for it runs a fourth, whose
rule has `bits=8`: it is lossy, and its claim is about held bytes alone.

`held` is the memory reserved from the driver above weights and batch data, after all steps.
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import pagestash as ps
from benchmarks.harness import Claim, write
from pagestash.kernels.gemm.grouped import grouped_mm
from pagestash.kernels.gemm.products import described
from pagestash.kernels.moe.route import Routing
from pagestash.moe import MoE, MoEConfig, Received

GIB = 1 << 30
EXACT, KEPT, STASHED = WAYS = ("exact, eager", "kept, graph", "stashed, graph")
CODED = "stashed, 8 bits, graph"


@dataclass(frozen=True, kw_only=True)
class Preset:
    tokens: int
    width: int
    inner: int
    top_k: int
    experts: int
    layers: int
    capacity: int = 4  # times the average
    expected: float | None = None
    """Rows that stay where they are, over the average; None: the keeper chooses."""
    fraction: float = 0.0
    """Of the expected rows' bytes: what is offloaded."""
    skewed: bool = False
    bars: tuple[float, float] = (1.0, 1.0)
    """Of time and held bytes, over exact-shape eager."""
    coded_bar: float | None = None
    """Of held bytes with eight bits."""
    bits: Literal[8] | None = None
    """Of the rule of `stashed`."""

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.coded_bar is None else (*WAYS, CODED)

    @property
    def average(self) -> int:
        return self.tokens * self.top_k

    @property
    def buffer(self) -> int:
        return self.capacity * self.average

    @property
    def expected_rows(self) -> int | Literal["auto"]:
        return "auto" if self.expected is None else int(self.expected * self.average)

    @property
    def most(self) -> float:
        """The most rows that a layer receives, over the average."""
        return 3.0 if self.skewed else 1.4

    @property
    def places(self) -> int:
        """Rows that a token may have, so that any source fits."""
        return math.ceil(self.most * self.top_k)


QWEN3 = Preset(tokens=8192, width=2048, inner=768, top_k=8, experts=16, layers=12, bars=(0.55, 0.47))
PRESETS = {
    "qwen3": replace(QWEN3, coded_bar=0.33),
    "dsv3": Preset(tokens=4096, width=7168, inner=2048, top_k=8, experts=8, layers=6, bars=(0.74, 0.38)),
    "skewed": replace(QWEN3, skewed=True, bars=(0.60, 0.43)),
}
ON_OVER_OFF = 1.02
SMALL = {"tokens": 32, "width": 64, "inner": 32, "experts": 4, "layers": 3}
"""What a preset becomes without a GPU: it shows that everything runs, and nothing else."""


@dataclass
class Batch:
    """What the wire brings in one step, for every layer [L, ...]; a row's place is `token × places + place`."""

    bounds: torch.Tensor  # int32 [L, E + 1]
    order: torch.Tensor  # int32 [L, buffer]: the place of each row
    inverse: torch.Tensor  # int32 [L, T, places]: the row of each place of a token, or -1
    # The same for the code that indexes by rows.
    source: torch.Tensor  # int64 [L, places × T]: the token of each row
    choice: torch.Tensor  # int64 [L, places × T]: whose weight it has, `token × top_k + choice`

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.bounds, self.order, self.inverse


def draw_counts(preset: Preset) -> list[int]:
    """The rows that each layer receives in one step."""
    if not preset.skewed:
        return [int((0.6 + 0.8 * torch.rand(())) * preset.average) for _ in range(preset.layers)]
    logarithms = torch.randn(preset.layers, dtype=torch.float64)
    low, high = 0.0, 20.0  # the standard deviation with which the fullest layer has the most
    for _ in range(50):
        middle = (low + high) / 2
        rows = torch.exp(middle * (logarithms - logarithms.max()))
        low, high = (middle, high) if rows.mean() * preset.most > 1 else (low, middle)
    rows = torch.exp(low * (logarithms - logarithms.max()))
    return [int(count) for count in rows / rows.mean() * preset.average]


def draw(preset: Preset, device: torch.device) -> Batch:
    layers, places = preset.layers, preset.tokens * preset.places
    inverse = torch.full((layers, places), -1, dtype=torch.int32, device=device)
    order = torch.zeros(layers, preset.buffer, dtype=torch.int32, device=device)
    # Each layer's begin at 16 bytes, as products read them.
    apart = -(-(preset.experts + 1) // 4) * 4
    bounds = torch.zeros(layers, apart, dtype=torch.int32, device=device)[:, : preset.experts + 1]
    for layer, count in enumerate(draw_counts(preset)):
        chosen = torch.randperm(places, device=device)[:count]
        order[layer, :count] = chosen
        inverse[layer, chosen] = torch.arange(count, dtype=torch.int32, device=device)
        share = torch.softmax(torch.randn(preset.experts), 0).cumsum(0)
        ends = (share * count).round().int()
        ends[-1] = count
        bounds[layer, 1:] = ends
    placed = order[:, :places].to(torch.int64)
    source = placed // preset.places
    choice = source * preset.top_k + placed % preset.places % preset.top_k
    return Batch(bounds, order, inverse.view(layers, preset.tokens, -1), source, choice)


class Wire:
    """A dispatch that brings the rows of a drawn batch: the residual stream is what arrived."""

    def __init__(self, preset: Preset, expected_rows: int | Literal["auto"]) -> None:
        self.experts, self.capacity, self._expected = preset.experts, preset.buffer, expected_rows
        self.routing: Routing | None = None

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        assert self.routing is not None
        # A token has more places here than choices: those beyond have the weights of the first ones again.
        places = self.routing.inverse.shape[1]
        weights = weights.repeat(1, -(-places // weights.shape[1]))[:, :places]
        # Without biases nobody asks which expert was chosen; anything of the ids' shape will do.
        return Received(x, weights, self.routing.inverse, self.routing, self._expected)

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        return slots

    def grow_capacity(self, *, headroom: float, alignment: int) -> bool:
        return False


class Stack(nn.Module):
    """MoE layers on a residual stream."""

    def __init__(
        self,
        preset: Preset,
        expected_rows: int | Literal["auto"],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": dtype}
        # The experts here are those of one rank in eight.
        config = MoEConfig(
            width=preset.width,
            expert_width=preset.inner,
            experts=8 * preset.experts,
            top_k=preset.top_k,
            capacity=preset.buffer,
            expected_rows=expected_rows,
        )
        self.wires = [Wire(preset, expected_rows) for _ in range(preset.layers)]
        self.layers = nn.ModuleList(MoE(config, dispatch=wire, **made) for wire in self.wires)
        self.tokens = nn.Parameter(torch.randn(preset.tokens, preset.width, **made))
        with torch.no_grad():  # without norms, a gated layer squares a large stream, and the next one again
            for moe in self.layers:
                moe.expert_fc2.weight.mul_(0.1)

    def forward(self, bounds: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        x = self.tokens
        for layer, (moe, wire) in enumerate(zip(self.layers, self.wires)):
            wire.routing = Routing(bounds[layer], bounds[layer], order[layer], inverse[layer])
            y, _ = moe(x)
            x = x + y
        return x.float().square().mean()

    def exact(self, batch: Batch) -> torch.Tensor:
        """What is usually written: shapes as large as what arrived, which the host has to know."""
        x = self.tokens
        multiply = _by_torch if x.is_cuda else _DifferentiableMM.apply
        for layer, moe in enumerate(self.layers):
            logits = F.linear(x, moe.router.weight).float()
            weights = torch.softmax(logits.topk(moe.config.top_k).values, dim=1)
            bounds = batch.bounds[layer]
            count = int(bounds[-1])  # the host waits here
            source = batch.source[layer, :count]
            h = multiply(x[source], moe.expert_fc1.weight.transpose(-2, -1), bounds)
            gate, linear = h.chunk(2, dim=1)
            rows = multiply(F.silu(gate) * linear, moe.expert_fc2.weight.transpose(-2, -1), bounds)
            scale = weights.to(x.dtype).reshape(-1).index_select(0, batch.choice[layer, :count])
            x = x + torch.zeros_like(x).index_add(0, source, rows * scale[:, None])
        return x.float().square().mean()


def _by_torch(a: torch.Tensor, b: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(a, b, offs=bounds[1:])


class _DifferentiableMM(torch.autograd.Function):
    """`F.grouped_mm` where there is no GPU."""

    @staticmethod
    def forward(ctx, a, b, bounds):
        ctx.save_for_backward(a, b, bounds)
        return grouped_mm(a, b, bounds)

    @staticmethod
    def backward(ctx, dy):
        a, b, bounds = ctx.saved_tensors
        return grouped_mm(dy, b.transpose(-2, -1), bounds), grouped_mm(a.t(), dy, bounds), None


class Run:
    """One way to train, ready to be called with a batch. All ways begin with the same weights."""

    def __init__(self, preset: Preset, way: str, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        stashes = way in (STASHED, CODED)
        bits = 8 if way == CODED else preset.bits
        self.stack = stack = Stack(preset, preset.expected_rows if stashes else 0, device, dtype)
        optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3, fused=True)
        self.keeper: ps.Keeper | None = None
        self.step: ps.GraphedStep | None = None

        def train_step(forward: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
            loss = forward(*arguments)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self._run = lambda batch: train_step(stack.exact, batch)
        if way != EXACT:
            rule = ps.Rule("layers.*.experts", "stash", fraction=preset.fraction, bits=bits)
            self.keeper = ps.Keeper(ps.Policy([rule] if stashes else [])).attach(stack)
            step = ps.GraphedStep(lambda *batch: train_step(stack, *batch), self.keeper, optimizer=optimizer)
            self.step, self._run = step, lambda batch: step(*batch.arguments())

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self._run(batch)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reserved(device: torch.device) -> int:
    """Bytes reserved from the driver, after what is cached was given back."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def measure(
    preset: Preset, way: str, batches: list[Batch], dtype: torch.dtype = torch.bfloat16
) -> tuple[Run, dict[str, Any]]:
    """The memory of one way over all batches, its loss of the last, and the run itself."""
    device = batches[0].order.device
    run = Run(preset, way, device, dtype)
    before = _reserved(device)
    allocated = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    losses = [run(batch) for batch in batches]
    if run.step is not None:
        run.step.wait()
    _wait(device)
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"{way}: a loss is not finite, so that its time and bytes say nothing")
    products = "torch" if way == EXACT else described(device, dtype)
    row: dict[str, Any] = {"way": way, "products": products}
    if device.type == "cuda":
        row["held_gib"] = (torch.cuda.memory_reserved() - before) / GIB
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - allocated) / GIB
    pool = None if run.keeper is None else run.keeper.pool
    row |= {
        "loss": float(losses[-1]),
        "pool_gib": 0.0 if pool is None else pool.stats().device.bytes / GIB,
        "overflow": False if pool is None else bool(pool.overflow),
        "reruns": 0 if run.step is None else run.step.reruns,
    }
    chosen = None if run.keeper is None else run.keeper.stats().expected_rows
    if chosen is not None:
        row |= {"expected": chosen.rows / preset.average, "changes": chosen.changes}
    return run, row


ROUNDS = 3
"""Over all batches. Clocks drift: the same code gave ratios of 1.01 to 1.05 by one round, 1.02 to 1.03 by three."""


def timed_in_turns(runs: dict[str, Run], batches: list[Batch], warm: int) -> dict[str, float]:
    """The median step of each way in ms, over batches that all differ.

    Each batch goes through all ways before the next, so that all see the device as warm. A step also depends on the
    one before it: products this large lower the clock, and where the device waited it is higher. So each way runs a
    batch twice, and the second run counts.
    """
    device = batches[0].order.device
    samples: dict[str, list[float]] = {way: [] for way in runs}
    for index, batch in enumerate(batches * ROUNDS):
        for way, run in runs.items():
            run(batch)
            _wait(device)
            start = time.perf_counter()
            run(batch)
            _wait(device)
            if index >= warm:
                samples[way].append((time.perf_counter() - start) * 1e3)
    return {way: statistics.median(taken) for way, taken in samples.items()}


def compare(
    name: str,
    steps: int,
    warm: int,
    device: torch.device,
    fraction: float = 0.0,
    bits: Literal[8] | None = None,
) -> tuple[list[dict[str, Any]], list[Claim]]:
    """All ways of a preset: a row each, and what is claimed of them. Without a GPU nothing is claimed."""
    preset, dtype = replace(PRESETS[name], fraction=fraction, bits=bits), torch.bfloat16
    if device.type != "cuda":
        preset, dtype = replace(preset, **SMALL), torch.float32
    torch.manual_seed(0)
    batches = [draw(preset, device) for _ in range(steps + warm)]
    runs: dict[str, Run] = {}
    rows = []
    for way in preset.ways:
        runs[way], row = measure(preset, way, batches, dtype)
        rows.append({"preset": name} | row)
        print(f"  {_line(row)}", flush=True)
    _reserved(device)
    for row, (way, ms) in zip(rows, timed_in_turns(runs, batches, warm).items()):
        row["ms"] = ms
        print(f"  {way}, ms {ms:,.2f}", flush=True)
    return rows, claims_of(name, rows) if device.type == "cuda" else []


def claims_of(name: str, rows: list[dict[str, Any]]) -> list[Claim]:
    exact, kept, stashed, *coded = rows
    time_bar, held_bar = PRESETS[name].bars
    over_exact = f"MoE step, {name}: stashed in a graph over exact-shape eager"
    figures = [
        (f"{over_exact}, time", stashed["ms"] / exact["ms"], time_bar),
        (f"{over_exact}, held bytes", stashed["held_gib"] / exact["held_gib"], held_bar),
        (f"MoE step, {name}: stash on over off, same graph, time", stashed["ms"] / kept["ms"], ON_OVER_OFF),
    ]
    for row in coded:
        bar = PRESETS[name].coded_bar
        assert bar is not None
        figures.append((f"{over_exact}, held bytes, 8 bits", row["held_gib"] / exact["held_gib"], bar))
    return [
        Claim(what=what, value=round(value, 4), bar=bar, better="at most") for what, value, bar in figures
    ]


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def run(
    out: Path | None = None,
    quick: bool = False,
    presets: list[str] | None = None,
    fraction: float = 0.0,
    bits: Literal[8] | None = None,
) -> Path:
    """Measure, write the result file after each preset, and return its path; about 90 s on an H200."""
    cuda = torch.cuda.is_available()
    if not cuda and not quick:
        raise SystemExit("moe_step: needs a CUDA GPU; --quick runs a small step without")
    steps, warm = (4, 2) if quick else (12, 3)
    rows, claims = [], []
    for name in presets or list(PRESETS):
        print(f"moe_step: {name}", flush=True)
        device = torch.device("cuda" if cuda else "cpu")
        more_rows, more_claims = compare(name, steps, warm, device, fraction, bits)
        rows += more_rows
        claims += more_claims
        gc.collect()  # the graphs of this preset
        path = write(
            "moe_step",
            config={
                "steps": steps,
                "capacity": 4,
                "rows": [0.6, 1.4],
                "skewed": 3.0,
                "layer": "MoE",
                "fraction": fraction,
                "bits": bits,
            },
            rows=rows,
            claims=claims,
            out=out,
        )
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", choices=list(PRESETS))
    parser.add_argument("--fraction", type=float, default=0.0, help="of the expected rows: offloaded")
    parser.add_argument("--bits", type=int, choices=[8], help="of what is stashed, without a way of its own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print(run(given.out, given.quick, given.preset, given.fraction, given.bits))
