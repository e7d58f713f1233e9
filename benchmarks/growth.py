"""What homes are worth at a scale that no one here can run: DeepSeek-V3 on 64 to 16,384 GPUs.

For each number of H100, and each set of homes: the largest microbatch that fits, in sequences of 4,096 tokens, and
the fastest step at that or any smaller microbatch. The layout is the fastest that `pagestash plan --cluster` finds,
with TP 1, ZeRO 1, bf16, and 16 sequences a GPU and step. 0: no layout fits.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness import write
from pagestash.models.config import preset
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.run import Run
from pagestash.simulation.search.homes import Allowed
from pagestash.simulation.search.layouts import Wanted
from pagestash.simulation.search.search import describe, search

DEVICES = (64, 256, 1024, 4096, 16384)
HOMES: dict[str, tuple[Allowed, ...]] = {
    "keep": (),
    "offload": ("offload",),
    "recompute": ("recompute",),
    "both": ("recompute", "offload"),
}
SIZES = (1, 2, 4)


def row(name: str, devices: int, allowed: tuple[Allowed, ...]) -> dict[str, Any]:
    """The largest microbatch and the fastest step."""
    cluster, config = read_cluster(f"{name}:{devices}"), preset("deepseek-v3")
    batch = 16 * devices
    base = Run(
        config=config, cluster=cluster, layout=Layout(devices=devices), sequence=4096, global_batch=batch
    )
    largest, best, told = 0, float("inf"), ""
    for size in SIZES:
        wanted = Wanted(
            config=config,
            cluster=cluster,
            sequence=4096,
            global_batch=batch,
            base=base,
            microbatches=(size,),
            allowed=allowed,
            fixed={"tp": 1},
            runners_up=0,
        )
        try:
            found = search(wanted)
        except ValueError:
            break
        largest = size
        if found.best.seconds < best:
            best, told = found.best.seconds, describe(found.best.run)
    return {
        "cluster": name,
        "devices": devices,
        "microbatch": largest,
        "seconds": round(best, 3) if largest else None,
        "tokens_per_second_per_device": round(batch * 4096 / devices / best) if largest else None,
        "layout": told,
    }


def timed_row(case: tuple[str, int, str]) -> dict[str, Any]:
    """A row, told with the seconds of one core that its searches took."""
    name, devices, what = case
    begun = time.process_time()
    found = {"homes": what, **row(name, devices, HOMES[what])}
    took = time.process_time() - begun
    told = f"{found['microbatch']} {found['seconds']} s {found['layout']} ({took:.0f} s)"
    print(f"{name}:{devices:<6} {what:10} {told}", flush=True)
    return found


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Search every row, several at a time, and write the table."""
    cases = [
        (name, devices, what)
        for name in ("h100", "gb200")
        for devices in (DEVICES[:2] if quick else DEVICES)
        for what in HOMES
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(timed_row, cases))
    return write("growth", config={"model": "deepseek-v3", "sequence": 4096}, rows=rows, claims=[], out=out)


if __name__ == "__main__":
    run()
