"""All-to-all under compute on one GPU, with a stand-in for the wire: how much of it a pair hides, at what price.

A *pair* is the backward of one microbatch and the forward of the next, of a few MoE layers of a published shape. It
is measured in sequence, where compute waits for every exchange, and overlapped. The wire has 50 or 200 GB/s:

    hidden = (in sequence - overlapped) / (min(wire F, compute B) + min(wire B, compute F))

The wire's terms are its bytes over its rate; the compute terms are measured without a wire. What a wire can hide is
bounded by the compute beside it: at 50 GB/s the wire of Qwen3 is several times its compute.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Claim, write
from benchmarks.paced_wire import PacedAllToAll, PacedRanks
from pagestash.models import Decoder, preset
from pagestash.moe import overlap

CASES = {
    # Experts of one of `ranks`, and tokens a microbatch.
    "deepseek-v3": {"ranks": 16, "layers": 3, "tokens": 4096},
    "qwen3-30b-a3b": {"ranks": 8, "layers": 8, "tokens": 8192},
}
RATES = (50e9, 200e9)
HIDDEN, PEAK = 0.85, 1.25


def run(out: Path | None = None, quick: bool = False, **_: Any) -> Path:
    # Read at the first product; without it torch refuses products in one order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    device = torch.device("cuda" if on_gpu else "cpu")
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    rows = []
    for name, case in CASES.items():
        for rate in RATES:
            rows.append(measure(name, rate, device, quick=quick, trace=_trace_path(out, name, rate), **case))
            print(rows[-1])
    claims = []
    for row in rows if on_gpu else ():  # a CPU has no second stream
        where = f"{row['model']}, {row['GB/s']:g} GB/s"
        hidden, peak = (
            f"share of the wire that a pair hides, {where}",
            f"peak of a pair over in sequence, {where}",
        )
        claims.append(Claim(what=hidden, value=row["hidden"], bar=HIDDEN, better="at least"))
        claims.append(Claim(what=peak, value=row["peak ratio"], bar=PEAK, better="at most"))
    return write("overlap", config={"cases": CASES, "quick": quick}, rows=rows, claims=claims, out=out)


def measure(
    name: str,
    rate: float,
    device: torch.device,
    *,
    ranks: int,
    layers: int,
    tokens: int,
    quick: bool,
    trace: Path | None,
) -> dict[str, Any]:
    config = preset(name, layers)
    config = replace(
        config, dense_layers=0, experts=config.experts // ranks, groups=1, group_limit=1, vocab=256
    )
    dtype = torch.bfloat16
    if quick:
        config = replace(config, layers=2, width=256, expert_width=64, heads=4)
        tokens, dtype = 64, torch.bfloat16 if device.type == "cuda" else torch.float32
    wire = PacedRanks(None, config.experts)
    wire.ranks = ranks
    torch.manual_seed(0)
    model = Decoder(
        config,
        make_dispatch=lambda moe: PacedAllToAll(moe, wire, tokens),
        device=device,
        dtype=dtype,
    )
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0, 0.02)
    batches = [torch.randint(256, (1, tokens + 1), device=device) for _ in range(2)]
    pairs = _Pairs(model, batches)
    pairs.step(_in_sequence)  # gradients exist from here on
    repeats = 1 if quick else 8

    wire.rate, wire.waits = 0.0, True
    forward, backward = pairs.halves(repeats)
    with _one_order():
        bits = [pairs.gradients(_in_sequence)]
    wire.rate = rate
    wire.wire_seconds = 0.0
    pairs.step(_in_sequence)
    each_way = wire.wire_seconds / 2  # a half has as many bytes as the other, but for the weights' gradients
    in_sequence = pairs.time(_in_sequence, repeats)
    wire.waits = False
    shared_under = pairs.time(_in_sequence, repeats)
    overlapped = pairs.time(overlap, repeats)
    with _one_order():
        bits.append(pairs.gradients(overlap))
    assert all(map(torch.equal, *bits)), "the pair has other bits than one after the other"
    if trace is not None and device.type == "cuda" and importlib.util.find_spec("matplotlib"):
        draw(pairs, trace, f"{name}, {rate / 1e9:g} GB/s")
    bound = min(each_way, backward) + min(each_way, forward)
    return {
        "model": name,
        "GB/s": rate / 1e9,
        "in sequence, ms": in_sequence["ms"],
        "in sequence, shared experts under the wire, ms": shared_under["ms"],
        "overlapped, ms": overlapped["ms"],
        "wire each way, ms": 1e3 * each_way,
        "compute forward, ms": 1e3 * forward,
        "compute backward, ms": 1e3 * backward,
        "hidden": (in_sequence["ms"] - overlapped["ms"]) / (1e3 * bound),
        "peak ratio": overlapped["peak"] / max(1, in_sequence["peak"]),
        "peak, GiB": overlapped["peak"] / 2**30,
        "host, ms a layer": overlapped["host ms"] / config.layers,
        "host in sequence, ms a layer": in_sequence["host ms"] / config.layers,
    }


@contextmanager
def _one_order() -> Iterator[None]:
    """Attention's gradient and the embedding's add in any order else."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _in_sequence(forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
    done = backward()
    return forward(), done


class _Pairs:
    """Steady pairs of one model: each step runs the backward of the last forward, and the next forward."""

    def __init__(self, model: Decoder, batches: list[torch.Tensor]) -> None:
        self._model, self._batches, self._count = model, batches, 0
        self._before = self._forward()

    def _forward(self) -> torch.Tensor:
        tokens = self._batches[self._count % len(self._batches)]
        self._count += 1
        loss, aux = self._model(tokens[:, :-1], tokens[:, 1:])
        return loss + aux

    def step(self, pair: Callable[..., Any]) -> None:
        before, self._before = self._before, None
        self._before, _ = pair(self._forward, before.backward)

    def gradients(self, pair: Callable[..., Any]) -> list[torch.Tensor]:
        """Of one microbatch, the first of the batches."""
        self._count = 0
        self._before = self._forward()
        for value in self._model.parameters():
            value.grad = None
        self.step(pair)
        return [value.grad.clone() for value in self._model.parameters()]

    def time(self, pair: Callable[..., Any], repeats: int) -> dict[str, float]:
        """The median time of a pair, its host time, and the peak of allocated bytes."""
        for _ in range(2):
            self.step(pair)
        _synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        times, host = [], []
        for _ in range(repeats):
            clock, began = _Clock(), time.perf_counter()
            self.step(pair)
            host.append(time.perf_counter() - began)
            times.append(clock.seconds())
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1
        return {"ms": 1e3 * statistics.median(times), "host ms": 1e3 * statistics.median(host), "peak": peak}

    def halves(self, repeats: int) -> tuple[float, float]:
        """Median seconds of a forward and of a backward alone."""
        forward, backward = [], []
        for _ in range(repeats + 1):
            clock = _Clock()
            self._before.backward()
            backward.append(clock.seconds())
            clock = _Clock()
            self._before = self._forward()
            forward.append(clock.seconds())
        return statistics.median(forward[1:]), statistics.median(backward[1:])


class _Clock:
    """Seconds of the compute stream from here on; of the host on a CPU."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._events = None
        if torch.cuda.is_available():
            # The host is ahead by the time of the sleep: its own time is measured apart.
            torch.cuda._sleep(20_000_000)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def seconds(self) -> float:
        if self._events is None:
            return time.perf_counter() - self._begin
        self._events[1].record()
        torch.cuda.synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _trace_path(out: Path | None, name: str, rate: float) -> Path | None:
    return None if out is None else out / f"overlap-{name}-{rate / 1e9:g}.png"


def draw(pairs: _Pairs, path: Path, title: str) -> None:
    """A picture of one pair: the kernels of each stream over time. Needs matplotlib."""
    from matplotlib import pyplot
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        pairs.step(overlap)
        torch.cuda.synchronize()
    found = [
        event for event in profiled.profiler.kineto_results.events() if event.device_type().name == "CUDA"
    ]
    begin = min(event.start_ns() for event in found)
    figure, axes = pyplot.subplots(figsize=(16, 2.5))
    streams = sorted({event.device_resource_id() for event in found})
    for event in found:
        wire = "paced" in event.name()
        axes.barh(
            streams.index(event.device_resource_id()),
            event.duration_ns() / 1e6,
            left=(event.start_ns() - begin) / 1e6,
            color="tab:orange" if wire else "tab:blue",
        )
    axes.set_yticks(range(len(streams)), [f"stream {each}" for each in streams])
    axes.set_xlabel("ms")
    axes.set_title(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
