"""One MoE layer, forward and backward, without expert parallelism, beside plain `F.grouped_mm` code.

    python -m benchmarks.moe_layer --shape 32768,2048,768,128,8      # T,d,n,E,K

Time is the median of single passes, each timed by events. `saved` is what stays allocated between forward and
backward besides the output, `peak` the most that was allocated in a pass above what stood before it. Each
way runs with every backend for products that is there. `products` are those of the layer, each alone in a graph.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gemm_sweep import Operands
from benchmarks.gemm_sweep import Shape as SweepShape
from benchmarks.gemm_sweep import graphed_ms as graphed_products
from benchmarks.harness import Claim, write
from pagestash.kernels.gemm.products import ENVIRONMENT, Products, _why_not_quack, described, products_for
from pagestash.moe import MoE, MoEConfig
from pagestash.pages.pool import PagePool

Shape = tuple[int, int, int, int, int]
SMALL: Shape = (8192, 2048, 768, 128, 8)
LARGE: Shape = (32768, 2048, 768, 128, 8)
BARS: dict[Shape, dict[str, float]] = {
    SMALL: {"quack": 3.9, "torch": 4.2},
    LARGE: {"quack": 13.5, "torch": 15.0},
}
SAVED_MIB: dict[Shape, float] = {SMALL: 227.0, LARGE: 909.0}
"""What SonicMoE 0.1.2 saves. It takes 6.56 and 15.5 ms."""
MIB = 1 << 20


def plain_layer(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The layer as it is usually written: sort, index, three grouped operations, weight, index_add."""
    top_k = moe.config.top_k
    scores = torch.softmax((x @ moe.router.weight.t()).float(), dim=1)
    weights, ids = scores.topk(top_k, dim=1)
    weights = (weights / weights.sum(1, keepdim=True)).to(x.dtype)
    order = ids.view(-1).argsort(stable=True)
    offsets = torch.histc(ids.view(-1).float(), moe.config.experts, 0, moe.config.experts - 1)
    offsets = offsets.cumsum(0).to(torch.int32)
    token = order // top_k
    h = F.grouped_mm(x[token], moe.expert_fc1.weight.transpose(-2, -1), offs=offsets)
    gate, linear = h.chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * linear, moe.expert_fc2.weight.transpose(-2, -1), offs=offsets)
    rows = rows * weights.view(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, token, rows)


def measure(forward: Callable, moe: MoE, x: torch.Tensor, dy: torch.Tensor, passes: int) -> dict[str, Any]:
    """Times in ms and bytes in MiB of `forward(x)` and its backward."""

    def once(events: list[torch.cuda.Event] | None = None) -> None:
        for leaf in (x, *moe.parameters()):
            leaf.grad = None
        if events:
            events[0].record()
        y = forward(x)
        if events:
            events[1].record()
        y.backward(dy)
        if events:
            events[2].record()

    for _ in range(3):
        once()
    torch.cuda.synchronize()
    samples = []
    for _ in range(passes):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        once(events)
        samples.append(events)
    torch.cuda.synchronize()

    for leaf in (x, *moe.parameters()):
        leaf.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = forward(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(dy)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "ms": statistics.median(e[0].elapsed_time(e[2]) for e in samples),
        "forward_ms": statistics.median(e[0].elapsed_time(e[1]) for e in samples),
        "saved_mib": saved / MIB,
        "peak_mib": peak / MIB,
    }


def graphed_ms(forward: Callable, moe: MoE, x: torch.Tensor, dy: torch.Tensor, passes: int) -> float:
    """The same pass, captured once and replayed."""

    def once() -> None:
        for leaf in (x, *moe.parameters()):
            leaf.grad = None
        forward(x).backward(dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    samples = []
    for _ in range(passes + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in samples[3:])


def kernels_of(forward: Callable, moe: MoE, x: torch.Tensor, dy: torch.Tensor) -> list[dict[str, Any]]:
    """The kernels of a pass: how often each runs, and how long in all, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for leaf in (x, *moe.parameters()):
            leaf.grad = None
        forward(x).backward(dy)
        torch.cuda.synchronize()
    found = [
        {"kernel": each.key[:120], "launches": each.count, "ms": each.device_time_total / 1e3}
        for each in seen.key_averages()
        if each.device_time_total and not each.key.startswith("ProfilerStep")
    ]
    return sorted(found, key=lambda each: -each["ms"])


def products_ms(shape: Shape, by: Products, passes: int) -> list[dict[str, Any]]:
    """The products of a layer, each timed alone in a graph, without what the layer does between them."""
    operands, found = Operands(SweepShape(*shape), "cuda"), []
    flops = 2 * shape[0] * shape[4] * shape[1] * shape[2]
    for name, count, call in operands.of_layer(by):
        ms = graphed_products([call], passes)
        found.append({"product": name, "ms": ms, "tflops": count * flops / ms / 1e9})
    return found


@contextmanager
def multiplied_by(name: str) -> Iterator[None]:
    """Products by that backend inside."""
    os.environ[ENVIRONMENT] = name
    _why_not_quack.cache_clear()
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]
        _why_not_quack.cache_clear()


def backends() -> list[str]:
    return ["torch"] if described(torch.device("cuda", 0)).startswith("torch") else ["quack", "torch"]


def compare(shape: Shape, passes: int) -> tuple[list[dict[str, Any]], list[Claim]]:
    tokens, width, inner, experts, top_k = shape
    name = ",".join(map(str, shape))
    torch.manual_seed(0)
    config = MoEConfig(width=width, expert_width=inner, experts=experts, top_k=top_k)
    moe = MoE(config, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    tera = 18 * tokens * top_k * width * inner / 1e12
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    ours = lambda x: moe(x)[0]  # noqa: E731

    def add(row: dict[str, Any]) -> None:
        rows.append({"shape": name} | row | {"tflops": tera / row["ms"] * 1e3})
        print(_line(rows[-1]), flush=True)

    plain = lambda x: plain_layer(moe, x)  # noqa: E731
    add({"layer": "plain", "gemm": "torch"} | measure(plain, moe, x, dy, passes))
    add({"layer": "plain, CUDA graph", "gemm": "torch", "ms": graphed_ms(plain, moe, x, dy, passes)})
    for gemm in backends():
        with multiplied_by(gemm):
            eager = measure(ours, moe, x, dy, passes)
            with torch.no_grad():  # (a graph that is still alive would break a capture)
                wanted = plain_layer(moe, x).float()
                eager["difference_from_plain"] = float((ours(x).float() - wanted).norm() / wanted.norm())
            eager["kernels"] = kernels_of(ours, moe, x, dy)
            eager["launches"] = sum(each["launches"] for each in eager["kernels"])
            eager["kernels_ms"] = sum(each["ms"] for each in eager["kernels"])
            eager["products"] = products_ms(shape, products_for(x, width, inner), passes)
            eager["products_ms"] = sum(each["ms"] for each in eager["products"])
            add({"layer": "pagestash", "gemm": gemm} | eager)
            graphed = {}
            for label, pool in (
                ("CUDA graph", None),
                (
                    "CUDA graph, projection in pages",
                    PagePool("cuda", device_bytes=4 * tokens * top_k * inner),
                ),
                ("CUDA graph, projection made again", PagePool("cuda", device_pages=1)),
            ):
                moe.experts.pool = pool
                graphed[label] = graphed_ms(ours, moe, x, dy, passes)
                add({"layer": f"pagestash, {label}", "gemm": gemm, "ms": graphed[label]})
            moe.experts.pool = None
        if shape not in BARS:
            continue
        what, ms = (
            f"MoE layer {name}, forward + backward in a CUDA graph, products by {gemm}",
            graphed["CUDA graph"],
        )
        claims.append(
            Claim(what=what, value=round(ms, 3), bar=BARS[shape][gemm], better="at most", unit="ms")
        )
        if gemm == "quack" and shape == LARGE:
            claims.append(
                Claim(
                    what=f"{what}, over the sum of its products",
                    value=round(ms / eager["products_ms"], 3),
                    bar=1.33,
                    better="at most",
                )
            )
        saved = round(eager["saved_mib"] + x.nbytes / 2**20, 1)
        what = f"MoE layer {name}, saved, its input included, products by {gemm}"
        claims.append(Claim(what=what, value=saved, bar=SAVED_MIB[shape], better="at most", unit="MiB"))
    return rows, claims


def _line(row: dict[str, Any]) -> str:
    numbers = " ".join(f"{k} {v:,.2f}" for k, v in row.items() if isinstance(v, float))
    return f"  {row['shape']} {row['layer']}: {numbers}"


def run(out: Path | None = None, quick: bool = False, shapes: list[Shape] | None = None) -> Path:
    """Measure, write the result file, and return its path; about half a minute on an H200."""
    if not torch.cuda.is_available():
        raise SystemExit("moe_layer: needs a CUDA GPU")
    passes = 10 if quick else 30
    rows, claims = [], []
    for shape in shapes or list(BARS):
        print(f"moe_layer: {shape}", flush=True)
        more_rows, more_claims = compare(shape, passes)
        rows += more_rows
        claims += more_claims
        torch.cuda.empty_cache()
    return write("moe_layer", config={"passes": passes}, rows=rows, claims=claims, out=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="T,d,n,E,K; may be given several times")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    asked = [tuple(map(int, s.split(","))) for s in given.shape] if given.shape else None
    print(run(given.out, given.quick, asked))  # type: ignore[arg-type]
