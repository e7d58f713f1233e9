"""Offload the MoE layers and norms of a deep slice: the bytes that leave, the fall of the peak, the step's time.

NVIDIA/Megatron-LM#1913 measured it on H100s, with 14 MoE layers of DeepSeek-V3: `expert_fc1`, `moe_act` and both
norms left. Here a rule for the MoE layer stands for the first two, because its router and shared experts save the
experts' input, too. The slice has fewer experts, so that one GPU holds it; what a token saves is the same.
"""

from pathlib import Path

import torch

from benchmarks.harness import write
from benchmarks.offload import (
    KEEP,
    MARGIN,
    Bench,
    Slice,
    at_least,
    at_most,
    fall_over_moved,
    fitting,
    rules,
    tell,
)
from pagestash.sizes import format_bytes

DEEP = Slice("deepseek-v3", 14, 1, 4096, {"dense_layers": 0, "experts": 16})
QUICK = Slice("tiny", 4, 2, 64, {"dense_layers": 0, "shared_experts": 1})
MOVED = ("layers.*.moe", "layers.*.attn_norm", "layers.*.mlp_norm")
PUBLISHED = {"kept_mb": 74_306, "offloaded_mb": 61_046, "kept_tflops": 321, "offloaded_tflops": 315}
"""Of Megatron-LM#1913: the most reserved memory, weights and optimizer included, and the throughput."""
FREED = 1 - PUBLISHED["offloaded_mb"] / PUBLISHED["kept_mb"]


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure keep, offload and keep again."""
    which, steps = (QUICK, 1) if quick else (DEEP, 6)
    bench = Bench(which, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    # First: once there are gradients, a profile has to copy them to the host.
    everything = rules("offload", MOVED, min_bytes="1KiB" if quick else None)
    chosen, fraction = fitting(bench.profile(repeats=1), everything)
    name = f"offload MoE layers and norms, {fraction:g} of it"
    plans = {"keep": KEEP, name: chosen, "keep, again": KEEP}
    rows = [bench.measure(policy, plan, steps) for policy, plan in plans.items()]
    keep, moved, again = rows
    for row in rows:
        tell(row, keep)
    if len({row["loss"] for row in rows}) != 1:
        raise RuntimeError(f"losses differ: { {row['policy']: row['loss'] for row in rows} }")
    moved["fraction"] = fraction
    moved["over_keep"] = 2 * moved["ms"] / (keep["ms"] + again["ms"])
    what = f"{which.preset}, {which.layers} MoE layers, {name} ({format_bytes(moved['moved_bytes'])})"
    claims = [at_most(f"{what}: step time over keep", moved["over_keep"], 1.02)]
    if "peak_bytes" in keep:
        moved["fall_over_moved"] = fall_over_moved(keep, moved)
        moved["freed"] = 1 - moved["peak_bytes"] / keep["peak_bytes"]
        claims += [
            at_least(f"{what}: fall of the peak over the bytes moved", moved["fall_over_moved"], 0.95),
            at_least(
                f"{what}: part of the activations' peak, beside Megatron's of all memory",
                moved["freed"],
                FREED,
            ),
        ]
        slower = PUBLISHED["kept_tflops"] / PUBLISHED["offloaded_tflops"]
        print(f"frees {moved['freed']:.3f} of the peak in {moved['over_keep']:.3f} of the time")
        print(f"Megatron-LM on H100s: {FREED:.3f} of all memory in {slower:.3f} of the time")
    config = {
        "slice": vars(which),
        "dtype": str(bench.model.head.weight.dtype),
        "margin": MARGIN,
        "published": PUBLISHED,
    }
    return write("offload_deep", config=config, rows=rows, claims=claims, out=out)
