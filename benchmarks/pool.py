"""The pool's own speed on a GPU: stash and restore against `copy_`, host pages against the pinned copy.

Every ratio is taken within one run, with what is compared measured in turns. Device copies are CUDA graphs over
several sets of buffers, larger together than the cache, so that neither launches nor the cache are measured.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Claim, write
from pagestash.kernels.pages import copy as copy_kernels
from pagestash.kernels.pages import stash as stash_kernels
from pagestash.kernels.pages.grid import GROUP, Grid
from pagestash.pages.pool import PagePool

MIB, GIB = 1 << 20, 1 << 30
PAGE = 65536
WIDTH = 2048  # bf16: rows of 4 KiB
SETS = {64 * MIB: 16, 256 * MIB: 6, GIB: 2}
"""Moved bytes, and how many sets of buffers of that size take turns in one graph."""
BAR = 0.94
MOST_LAUNCHES = 9  # a reservation, and a copy for each of eight tensors


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure all of it and write `pool.json`; `quick` repeats less and leaves the largest size out."""
    require_cuda()
    sizes = [size for size in SETS if not quick or size < GIB]
    repeats = 10 if quick else 40
    rows: list[dict[str, Any]] = []
    for size, occupancy in itertools.product(sizes, (1.0, 0.25)):
        rows += device_copies(size, occupancy, repeats)
        torch.cuda.empty_cache()
    claims = []
    for what, occupancy in itertools.product(("stash", "restore"), (1.0, 0.25)):
        ratios = [row["ratio"] for row in rows if row["what"] == what and row["occupancy"] == occupancy]
        filled = "full" if occupancy == 1.0 else "a quarter full"
        claims.append(
            at_least(
                f"{what} over `copy_` of the same bytes, buffers {filled}, worst of 64 MiB and more",
                min(ratios),
            )
        )

    spills = host_copies(256 * MIB if quick else GIB, 3 if quick else 9)
    claims += [
        at_least(f"{row['what']}, over the pinned copy", row["ratio"]) for row in spills if "ratio" in row
    ]
    rows += spills

    group = group_of_eight(repeats)
    rows.append(group)
    for what in ("stash", "restore"):
        claims.append(
            Claim(
                what=f"launches to {what} a group of eight 1 MiB tensors",
                value=group[f"{what}_launches"],
                bar=MOST_LAUNCHES,
                better="at most",
            )
        )
    for row in rows:
        figures = {key: value for key, value in row.items() if key != "what"}
        print(f"{row['what']}:", "  ".join(f"{key}={value:.4g}" for key, value in figures.items()))
    config = {
        "page_bytes": PAGE,
        "row_bytes": 2 * WIDTH,
        "repeats": repeats,
        "quick": quick,
        "stash": stash_kernels.ALONE._asdict(),
        "restore": copy_kernels.ALONE._asdict(),
        "groups": GROUP._asdict(),
        "host": {"programs": copy_kernels.HOST_PROGRAMS, "warps": copy_kernels.HOST_WARPS},
    }
    return write("pool", config=config, rows=rows, claims=claims, out=out)


def require_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("benchmarks.pool: needs a CUDA GPU, and torch sees none")


def at_least(what: str, ratio: float) -> Claim:
    return Claim(what=what, value=round(ratio, 4), bar=BAR, better="at least")


# --- timing -----------------------------------------------------------------------------------------------------


def in_turns(works: dict[str, Callable[[], Any]], repeats: int, warm: int = 2) -> dict[str, float]:
    """Median seconds of each work on the device; one of each, then again, so that all see the same clocks."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm + repeats):
        events = {}
        # The device waits a millisecond while the host launches: what is timed is never a late launch.
        torch.cuda._sleep(2_000_000)
        for name, work in works.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        if turn >= warm:
            for name, (start, end) in events.items():
                times[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`work` as a graph; without the garbage collection of `torch.cuda.graph`, which a sweep cannot afford."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        work()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


# --- device pages -----------------------------------------------------------------------------------------------


@dataclass
class Cycle:
    """Sets of buffers, and the graphs that stash all of them, restore all of them and give the pages back."""

    works: dict[str, Callable[[], Any]]
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    kept: list[Any]  # graphs and tickets: what the replays read


def make_sources(size: int, occupancy: float, sets: int) -> list[torch.Tensor]:
    capacity = int(size / occupancy) // (2 * WIDTH)
    shape = (capacity, WIDTH)
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(sets)]


def make_cycle(size: int, sources: list[torch.Tensor], targets: list[torch.Tensor], pool: PagePool) -> Cycle:
    n = torch.full((), size // (2 * WIDTH), dtype=torch.int32, device="cuda")
    warm = pool.stash(sources[:1], rows=n)
    for fill in (None, 0.0):
        pool.restore_into(warm, targets[:1], fill)
    pool.release(warm)
    pool.reset()
    tickets: list[Any] = []

    def stash_all() -> None:
        tickets.extend(pool.stash([source], rows=n)[0] for source in sources)

    def restore_all(fill: float | None) -> None:
        for ticket, target in zip(tickets, targets):
            pool.restore_into([ticket], [target], fill)

    def release_all() -> None:
        for ticket in tickets:
            pool.release([ticket])

    graphs = {
        "stash": captured(stash_all),
        "restore": captured(lambda: restore_all(None)),
        "restore, tail zeroed": captured(lambda: restore_all(0.0)),
        "release": captured(release_all),
    }
    return Cycle(
        {name: graph.replay for name, graph in graphs.items()}, sources, targets, [graphs, tickets, n]
    )


def verify(cycle: Cycle, rows: int, pool: PagePool) -> None:
    """Once more through the graphs, into targets wiped of what `copy_` left there."""
    for target in cycle.targets:
        target.zero_()
    for name in ("stash", "restore", "release"):
        cycle.works[name]()
    pairs = zip(cycle.sources, cycle.targets)
    if pool.stats().overflow or not all(
        torch.equal(source[:rows], target[:rows]) for source, target in pairs
    ):
        raise RuntimeError("the restored bytes are not the stashed ones: nothing was measured")


def device_copies(size: int, occupancy: float, repeats: int) -> list[dict[str, Any]]:
    """Stash, restore and release of `size` valid bytes, in buffers that they fill to `occupancy`."""
    sets = SETS[size]
    sources = make_sources(size, occupancy, sets)
    targets = [torch.empty_like(source) for source in sources]
    pool = PagePool("cuda", PAGE, device_bytes=sets * size)
    cycle = make_cycle(size, sources, targets, pool)
    rows = size // (2 * WIDTH)

    def copy_all() -> None:
        for source, target in zip(sources, targets):
            target[:rows].copy_(source[:rows])

    graph = captured(copy_all)
    # In a graph and launched one by one; the faster of the two is what ours is held against.
    seconds = in_turns({"copy in a graph": graph.replay, "copy": copy_all, **cycle.works}, repeats)
    verify(cycle, rows, pool)
    best_copy = min(seconds.pop("copy in a graph"), seconds.pop("copy")) / sets
    tail = sources[0].nbytes - size
    found: list[dict[str, Any]] = [{"what": "copy_", "seconds": best_copy, "bytes_moved": 2 * size}]
    for name, value in seconds.items():
        row: dict[str, Any] = {"what": name, "seconds": value / sets}
        if name != "release":
            # Each valid byte is read and written; a zeroed tail is written besides.
            row["bytes_moved"] = 2 * size + (tail if name == "restore, tail zeroed" else 0)
            row["ratio"] = (row["bytes_moved"] / row["seconds"]) / (2 * size / best_copy)
        found.append(row)
    for row in found:
        row |= {"size": size, "occupancy": occupancy}
        if "bytes_moved" in row:
            row["tb_per_s"] = row["bytes_moved"] / row["seconds"] / 1e12
    return found


# --- host pages -------------------------------------------------------------------------------------------------


def host_copies(size: int, repeats: int) -> list[dict[str, Any]]:
    """A tensor that has only host pages: out and back, by all the device's blocks and by the few that run beside
    compute, against the copy engine."""
    (source,) = make_sources(size, 1.0, 1)
    target = torch.empty_like(source)
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    pool = PagePool("cuda", PAGE, device_pages=0, host_bytes=size)
    held: list[Any] = []

    def stash_inline() -> None:
        held[:] = pool.stash([source])

    def release() -> None:
        pool.release(held)

    def reserve() -> None:
        held[:] = pool.stash([source], host_later=True)

    works = {
        "pinned copy out": lambda: pinned.copy_(source, non_blocking=True),
        "pinned copy back": lambda: target.copy_(pinned, non_blocking=True),
        "spill to host pages, inline": stash_inline,
        "way back from host pages, inline": lambda: pool.restore_into(held, [target], None),
        "release": release,
        "reserve": reserve,
        "spill to host pages, beside compute": lambda: pool.spill(held, [source]),
        "way back from host pages, beside compute": lambda: pool.restore_into(
            held, [target], None, tiers="host"
        ),
        "release again": release,
    }
    seconds = in_turns(works, repeats, warm=1)
    for name, work in works.items():
        if name.startswith("pinned"):
            continue
        if name.startswith("way back"):
            target.zero_()
        work()
        if name.startswith("way back") and not torch.equal(source, target):
            raise RuntimeError(f"{name}: the bytes did not come back as they were: nothing was measured")
    found = []
    for name, value in seconds.items():
        if "release" in name or name == "reserve":
            continue
        row: dict[str, Any] = {"what": name, "size": size, "seconds": value, "gb_per_s": size / value / 1e9}
        if not name.startswith("pinned"):
            row["ratio"] = seconds[f"pinned copy {'out' if 'spill' in name else 'back'}"] / value
        found.append(row)
    return found


# --- a small group ----------------------------------------------------------------------------------------------


def group_of_eight(repeats: int) -> dict[str, Any]:
    """Eight tensors of 1 MiB: microseconds in a graph and on the host, and launches, each way."""
    groups = 16
    pool = PagePool("cuda", PAGE, device_bytes=groups * 8 * MIB)
    sets = [
        [torch.empty(256, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(8)]
        for _ in range(groups)
    ]
    targets = [[torch.empty_like(tensor) for tensor in tensors] for tensors in sets]
    n = torch.full((), 256, dtype=torch.int32, device="cuda")
    held: list[list[Any]] = []
    works: dict[str, Callable[[], Any]] = {
        "stash": lambda: held.extend(pool.stash(tensors, rows=n) for tensors in sets),
        "restore": lambda: [pool.restore_into(*pair) for pair in zip(held, targets)],
        "release": lambda: [pool.release(tickets) for tickets in held],
    }
    row: dict[str, Any] = {"what": "a group of eight 1 MiB tensors", "size": 8 * MIB}
    for work in works.values():  # compiles
        work()
    held.clear()
    torch.cuda.synchronize()
    for name, work in works.items():
        start = time.perf_counter()
        work()
        row[f"{name}_host_us"] = (time.perf_counter() - start) / groups * 1e6
    torch.cuda.synchronize()
    held.clear()
    graphs = {name: captured(work) for name, work in works.items()}
    for name, value in in_turns({name: graph.replay for name, graph in graphs.items()}, repeats).items():
        row[f"{name}_us"] = value / groups * 1e6
    kept = list(held)  # the graphs' own books
    held.clear()

    def one_group(name: str) -> Callable[[], Any]:
        return {
            "stash": lambda: held.append(pool.stash(sets[0], rows=n)),
            "restore": lambda: pool.restore_into(held[0], targets[0]),
            "release": lambda: pool.release(held[0]),
        }[name]

    for name in works:
        row[f"{name}_launches"] = count_launches(one_group(name))
    del kept
    if any(not torch.equal(a, b) for pair in zip(sets, targets) for a, b in zip(*pair)):
        raise RuntimeError("the restored bytes are not the stashed ones: nothing was measured")
    return row


def count_launches(work: Callable[[], Any]) -> int:
    """Kernels, copies and fills that `work` puts on the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    launches = sum(event.device_type == DeviceType.CUDA for event in seen.events())
    if not launches:
        raise RuntimeError("the profiler saw no kernel: launches cannot be counted on this machine")
    return launches


# --- choosing the constants -------------------------------------------------------------------------------------

CHUNKS = ((16384, 16), (4096, 4), (8192, 8), (8192, 4), (16384, 8), (32768, 16))
"""Bytes, and warps."""
PROGRAMS = (2, 8, 16, 32, 64, 128)


def tune(repeats: int = 7, budget_s: float = 85.0) -> list[dict[str, Any]]:
    """Sweep chunk, warps and programs of both kernels for one tensor of 64 MiB and of 1 GiB; print the best and
    return all.

    Stops early, and says so, when `budget_s` is spent: each chunk is two compilations.
    """
    require_cuda()
    began = time.monotonic()
    modules: tuple[Any, ...] = (stash_kernels, copy_kernels)
    before = [module.ALONE for module in modules]
    cases = []
    for size in (64 * MIB, GIB):
        sources = make_sources(size, 1.0, SETS[size])
        targets = [torch.empty_like(source) for source in sources]
        cases.append((size, sources, targets, PagePool("cuda", PAGE, device_bytes=SETS[size] * size)))
    found: list[dict[str, Any]] = []
    try:
        for chunk, warps in CHUNKS:
            if time.monotonic() - began > budget_s:
                print(f"{budget_s} s are spent: chunks from {chunk} with {warps} warps on were left out")
                break
            for programs, (size, sources, targets, pool) in itertools.product(PROGRAMS, cases):
                grid = Grid(chunk, warps, programs)
                for module in modules:
                    module.ALONE = grid
                found.append(tune_one(size, sources, targets, pool, repeats) | {"grid": grid})
            print(f"chunk {chunk}, {warps} warps: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for module, grid in zip(modules, before):
            module.ALONE = grid
    for what, (size, *_) in itertools.product(("stash", "restore"), cases):
        print(f"\n{what}, {size // MIB} MiB, over copy_:")
        of_size = [row for row in found if row["size"] == size]
        for row in sorted(of_size, key=lambda row: -row[what])[:6]:
            print(f"  {row[what]:.3f}  {row['grid']}")
    for what in ("stash", "restore"):
        print(f"\n{what}, the worse of both sizes, over copy_:")
        worst: dict[Grid, float] = {}
        for row in found:
            worst[row["grid"]] = min(worst.get(row["grid"], 9.0), row[what])
        for grid, ratio in sorted(worst.items(), key=lambda item: -item[1])[:6]:
            print(f"  {ratio:.3f}  {grid}")
    return found


def tune_one(
    size: int, sources: list[torch.Tensor], targets: list[torch.Tensor], pool: PagePool, repeats: int
) -> dict[str, Any]:
    cycle = make_cycle(size, sources, targets, pool)

    def copy_all() -> None:
        for source, target in zip(sources, targets):
            target.copy_(source)

    graph = captured(copy_all)
    seconds = in_turns({"copy in a graph": graph.replay, "copy": copy_all, **cycle.works}, repeats)
    verify(cycle, size // (2 * WIDTH), pool)
    best_copy = min(seconds["copy in a graph"], seconds["copy"])
    return {"size": size, "stash": best_copy / seconds["stash"], "restore": best_copy / seconds["restore"]}
