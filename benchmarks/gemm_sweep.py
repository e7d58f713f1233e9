"""Tiles of quack's grouped products: each product and shape with each tile, beside torch's `F.grouped_mm`.

    python -m benchmarks.gemm_sweep

`pagestash/kernels/gemm/tiles.py` has the table that this measures. Products are timed in a CUDA graph, over several
sets of operands so that none is in a cache. A tile whose result is wrong ends the sweep.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import write
from pagestash.kernels.gemm.products import TORCH, Products
from pagestash.kernels.gemm.rows import TokenRows
from pagestash.kernels.gemm.tiles import Product, Tile, tile_for
from pagestash.kernels.moe.gated import forward as gated
from pagestash.kernels.moe.route import Routing, route
from pagestash.kernels.moe.row_info import RowInfo


class Shape(NamedTuple):
    tokens: int
    width: int
    inner: int
    experts: int
    top_k: int
    skew: float = 0.0
    """Of the experts' popularity: the exponent of a power law; 0 is even."""


SHAPES = {
    "qwen3": Shape(32768, 2048, 768, 128, 8),
    "qwen3, few rows": Shape(8192, 2048, 768, 128, 8),
    "qwen3, skewed": Shape(16384, 2048, 768, 128, 8, 0.8),
    "gpt-oss": Shape(8192, 2880, 2880, 32, 4),
    "deepseek-v3, 8 experts here": Shape(4096, 7168, 2048, 8, 4),
    "kimi-k3, 16 experts here": Shape(4096, 7168, 2048, 16, 4),
}
PINGPONG = [(128, 128), (128, 160), (128, 192), (192, 128)]
SHARED = [(128, 256), (256, 128), (256, 160), (256, 192)]
CANDIDATES = [
    *(Tile(*mn, True) for mn in PINGPONG),
    *(Tile(*mn, False) for mn in SHARED),
    *(Tile(128, 192, True, *cluster) for cluster in ((1, 1), (1, 2))),
    *(Tile(128, 256, False, *cluster) for cluster in ((1, 1), (1, 2))),
    Tile(256, 192, False, 1, 2),
]
PRODUCTS: tuple[Product, ...] = (
    "up_gated", "forward", "gathered", "gradient", "weights", "gathered_weights",
)  # fmt: skip


OF_UP = ("up_gated", "gradient", "gathered_weights")
"""Products with matrices of the first projection; the others have those of the second."""


class Operands:
    def __init__(self, shape: Shape, device: str) -> None:
        made: Any = {"device": device, "dtype": torch.bfloat16}
        popularity = torch.arange(1, shape.experts + 1, device=device).float() ** -shape.skew
        ids = torch.multinomial(popularity.expand(shape.tokens, -1), shape.top_k).int()
        self.routing: Routing = route(ids, shape.experts)
        self.bounds = self.routing.bounds
        rows, H = ids.numel(), 2 * shape.inner
        self.x = torch.randn(shape.tokens, shape.width, **made)
        self.x_R = torch.randn(rows, shape.width, **made)
        self.h_R = torch.randn(rows, H, **made)
        self.a_R = torch.randn(rows, shape.inner, **made)
        self.up = torch.randn(shape.experts, H, shape.width, **made) * shape.width**-0.5
        self.down = torch.randn(shape.experts, shape.width, shape.inner, **made) * shape.inner**-0.5

    def calls(self, product: Product, by: Any) -> list[Callable[[], Any]]:
        """What a layer computes by `product`."""
        x, bounds = self.rows_of(self.x), self.bounds
        found: dict[str, list[Callable[[], Any]]] = {
            "up_gated": [lambda: by.up_gated(x, self.up, bounds)],
            "forward": [lambda: by.forward(self.a_R, self.down, bounds)],
            "gathered": [lambda: by.input_gradient(x, self.down, bounds)],
            "gradient": [lambda: by.input_gradient(self.h_R, self.up, bounds, paired=True)],
            "weights": [lambda: by.weight_gradient(self.x_R, self.a_R, bounds)],
            "gathered_weights": [
                lambda: by.weight_gradient(x, self.a_R, bounds),
                lambda: by.weight_gradient(self.h_R, x, bounds, paired=True),
            ],
        }
        return found[product]

    def of_layer(self, by: Products) -> list[tuple[str, int, Callable[[], Any]]]:
        """What one layer multiplies: names, how many times R·D·N products each is, and calls."""
        x, bounds = self.rows_of(self.x), self.bounds
        fused = by.gates(x.shape[0], self.up)
        # Where rows are not gathered, what permutes them is no part of the product.
        rows = x if fused else self.x_R
        return [
            ("up, gated", 2, lambda: by.up_gated(x, self.up, bounds))
            if fused
            else ("up", 2, lambda: by.forward(rows, self.up, bounds)),
            ("down", 1, lambda: by.forward(self.a_R, self.down, bounds)),
            ("gradient of down's input", 1, lambda: by.input_gradient(rows, self.down, bounds)),
            ("gradient of up's input", 2, lambda: by.input_gradient(self.h_R, self.up, bounds, paired=fused)),
            ("gradient of down", 1, lambda: by.weight_gradient(rows, self.a_R, bounds)),
            ("gradient of up", 2, lambda: by.weight_gradient(self.h_R, rows, bounds, paired=fused)),
        ]

    def rows_of(self, tokens_TD: torch.Tensor) -> TokenRows:
        found = TokenRows(tokens_TD, self.routing.inverse, self.routing.order)
        found.token_R  # noqa: B018  (made before anything is timed)
        return found

    def by_torch(self, product: Product) -> list[Callable[[], Any]]:
        """The same by torch, with what it needs besides: the permuted rows, the activation."""
        rows, permuted = RowInfo(self.routing.rows), self.rows_of(self.x)
        fresh = lambda: self.rows_of(self.x)  # noqa: E731
        if product == "up_gated":
            return [lambda: gated(TORCH.forward(fresh(), self.up, self.bounds), rows)]
        if product == "gradient":
            return [lambda: TORCH.input_gradient(self.h_R, self.up, self.bounds)]
        if product == "gathered_weights":  # of dy, which is there permuted, and of x, which is not
            permuted.permuted()
            return [
                lambda: TORCH.weight_gradient(permuted, self.a_R, self.bounds),
                lambda: TORCH.weight_gradient(self.h_R, fresh(), self.bounds),
            ]
        if product == "gathered":
            return [lambda: TORCH.input_gradient(fresh(), self.down, self.bounds)]
        return self.calls(product, TORCH)

    def check(self, product: Product, by: Any) -> float:
        """The relative error against torch."""
        pairs = torch.cat([self.h_R[:, 0::2], self.h_R[:, 1::2]], 1)
        x, got = self.rows_of(self.x), [call() for call in self.calls(product, by)]
        if product == "up_gated":
            h = TORCH.forward(x, self.up, self.bounds)
            gate, linear = got[0][0][:, 0::2], got[0][0][:, 1::2]
            got = [torch.cat([gate, linear], 1), got[0][1]]
            wanted = [h, gated(h, RowInfo(self.routing.rows))]
        elif product == "gradient":
            wanted = [TORCH.input_gradient(pairs, self.up, self.bounds)]
        elif product == "gathered_weights":
            wanted = [
                TORCH.weight_gradient(x, self.a_R, self.bounds),
                TORCH.weight_gradient(pairs, x, self.bounds),
            ]
        else:
            wanted = [call() for call in self.calls(product, TORCH)]
        errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(got, wanted)]
        return float(torch.stack(errors).max())


def graphed_ms(calls: list[Callable[[], Any]], repeats: int) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in samples[2:])


def fits(product: Product, tile: Tile) -> bool:
    """Whether quack has such a kernel."""
    gathers = product in ("up_gated", "gathered", "gathered_weights")
    return not (gathers and tile.cluster_n > 1)


def compile_one(job: tuple[Product, Tile]) -> str | None:
    """Compile the kernels of a product without a GPU, for the cache on disk; what went wrong, if anything did."""
    import quack.gemm
    import quack.gemm_runtime.host
    import quack.gemm_tvm_ffi_utils

    from pagestash.kernels.gemm.quack import QuackProducts

    product, tile = job
    for module in (quack.gemm, quack.gemm_runtime.host, quack.gemm_tvm_ffi_utils):
        for name, stand_in in (("get_max_active_clusters", 132), ("launch_gemm", None)):
            if hasattr(module, name):
                setattr(module, name, lambda *_, value=stand_in, **__: value)
    try:
        tiny = Operands(Shape(64, 256, 128, 2, 2), "cpu")
        for call in tiny.calls(product, QuackProducts(lambda *_: tile)):
            call()
    except Exception as error:
        return f"{product} {tile}: {type(error).__name__}: {str(error)[:300]}"
    return None


def compile_all(jobs: list[tuple[Product, Tile]], workers: int) -> Iterator[str]:
    os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from (found for found in pool.map(compile_one, jobs) if found is not None)
    finally:
        for name in ("QUACK_ARCH", "CUTE_DSL_ARCH", "CUDA_VISIBLE_DEVICES"):
            os.environ.pop(name, None)


def sweep(name: str, shape: Shape, tiles: list[Tile], repeats: int) -> list[dict[str, Any]]:
    from pagestash.kernels.gemm.quack import QuackProducts

    torch.manual_seed(0)
    operands, rows = Operands(shape, "cuda"), []
    experts, count = shape.experts, shape.tokens * shape.top_k
    for product in PRODUCTS:
        by_torch = graphed_ms(operands.by_torch(product), repeats)
        found: dict[Tile, float] = {}
        for tile in tiles:
            if not fits(product, tile):
                continue
            products = QuackProducts(lambda *_, tile=tile: tile)
            try:
                error = operands.check(product, products)
                found[tile] = graphed_ms(operands.calls(product, products), repeats)
            except Exception as problem:
                print(f"  {product} {tile}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                continue
            if not error < 1e-2:
                print(f"  {product} {tile}: relative error {error}", flush=True)
                del found[tile]
        best = min(found, key=found.__getitem__)
        up, down = (2 * shape.inner, shape.width), (shape.width, shape.inner)
        sides = up if product in OF_UP else down
        chosen = tile_for(product, count, experts, *sides)
        print(
            f"  {name} {product}: torch {by_torch:.3f}, best {found[best]:.3f} {tuple(best)}, "
            f"chosen {found.get(chosen, float('nan')):.3f}",
            flush=True,
        )
        rows.append(
            {"shape": name, **shape._asdict(), "product": product, "torch_ms": by_torch}
            | {"ms": [{**tile._asdict(), "ms": ms} for tile, ms in sorted(found.items(), key=lambda e: e[1])]}
        )
    return rows


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure, write the result file, and return its path; two minutes on an H200 with 16 cores."""
    if not torch.cuda.is_available():
        raise SystemExit("gemm_sweep: needs a CUDA GPU")
    tiles = CANDIDATES[::4] if quick else CANDIDATES
    jobs = [(product, tile) for product in PRODUCTS for tile in tiles if fits(product, tile)]
    refused = list(compile_all(jobs, min(16, os.cpu_count() or 1)))
    print("\n".join(refused), flush=True)
    rows = []
    for name, shape in SHAPES.items():
        rows += sweep(name, shape, tiles, 5 if quick else 10)
        torch.cuda.empty_cache()
    return write("gemm_sweep", config={"tiles": len(tiles)}, rows=rows, claims=[], out=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print(run(given.out, given.quick))
