"""Every way that a user of transformers could take to train with less memory, and ours: time over memory.

    python -m benchmarks rivals
    python -m benchmarks rivals --longest      # how long a sequence each way can take, beside those times

Forward and backward of the slice of Qwen3-30B-A3B that `hf_step` has, from the same weights and tokens. Each way
has a process of its own, because some of them replace classes for good. All are from public packages with their
defaults; a way whose package is missing leaves its row out. Memory is the peak above weights and gradients.

`longest` is the longest single sequence that trains in 80 GiB, weights and gradients included: peaks of two lengths
say where to look, and the length was run.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pagestash as ps
from benchmarks import hf_step
from benchmarks.harness import Claim, begun, write
from benchmarks.hf_step import POLICY, QUICK, Slice, build, checkpointed, optimized

Step = Callable[[], AbstractContextManager[Any]]


CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
LIMIT = 80 << 30
GRAIN = 2048
PROBES = (8192, 16384)
"""Tokens."""
PATIENCE = 240
"""Seconds for one way. (Liger tunes its experts at their first call, for minutes.)"""


@dataclass(frozen=True)
class Ready:
    """A model, and what stands around its forward and backward."""

    model: Any
    around: Step = nullcontext


def plain(make: Callable[[str], Any]) -> Ready:
    return Ready(make("grouped_mm"))


def checkpointing(make: Callable[[str], Any]) -> Ready:
    return Ready(checkpointed(make("grouped_mm")))


def selective(make: Callable[[str], Any]) -> Ready:
    from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing

    model = make("grouped_mm")
    enable_selective_activation_checkpointing(model)
    return Ready(checkpointed(model))


def trl_offload(make: Callable[[str], Any]) -> Ready:
    from trl.models import get_act_offloading_ctx_manager

    model = make("grouped_mm")
    manager = get_act_offloading_ctx_manager(model)
    return Ready(model, lambda: manager)


def compiled(make: Callable[[str], Any], budget: float = 1.0) -> Ready:
    """Layer by layer. (On an H200 the model as a whole took 123 ms, its layers 90.)"""
    torch._functorch.config.activation_memory_budget = budget  # type: ignore[attr-defined]
    model = make("grouped_mm")
    for layer in model.model.layers:
        layer.compile()
    return Ready(model)


def liger(make: Callable[[str], Any], checkpoints: bool = False) -> Ready:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = make("grouped_mm")
    _apply_liger_kernel_to_instance(model=model)
    return Ready(checkpointed(model) if checkpoints else model)


def ours(make: Callable[[str], Any], **keeper: Any) -> Ready:
    model, _ = optimized(make("pagestash"))
    if not keeper:
        return Ready(model)
    return Ready(model, ps.Keeper(**keeper).attach(model).step)


def ours_checkpointed(make: Callable[[str], Any]) -> Ready:
    return Ready(checkpointed(optimized(make("pagestash"))[0]))


OURS = "pagestash"
TITLE = "Qwen3-30B-A3B in transformers, 8 layers"
INK, THEIRS, COLOUR = "#1b2733", "#e08a2c", "#2f7dd1"
WAYS: dict[str, Callable[[Callable[[str], Any]], Ready]] = {
    "transformers": plain,
    "gradient checkpointing": checkpointing,
    "selective checkpointing (TRL)": selective,
    "activation offloading (TRL)": trl_offload,
    "torch.compile of each layer": compiled,
    "torch.compile of each layer, budget 0.5": partial(compiled, budget=0.5),
    "torch.compile of each layer, budget 0.2": partial(compiled, budget=0.2),
    "Liger": liger,
    "Liger, checkpointing": partial(liger, checkpoints=True),
    f"{OURS}: optimize": ours,
    f"{OURS}: huggingface.toml": partial(ours, policy=POLICY),
    # (Each step is timed with a wait before and after it.)
    f"{OURS}: planned for 60%": partial(ours, budget="60%", waits=True),
    f"{OURS}: planned for 45%": partial(ours, budget="45%", waits=True),
    f"{OURS}: gradient checkpointing": ours_checkpointed,
}


def measure(
    way: str,
    shape: Slice,
    *,
    warm: int,
    repeats: int,
    device: torch.device = CUDA,
    dtype: torch.dtype = DTYPE,
) -> dict[str, Any]:
    """One way, in this process. (A planned step has its plan and its pool after the third.)"""
    ready = WAYS[way](partial(build, shape, device, dtype))
    found = hf_step.measure(
        ready.model, _Around(ready.around), shape.tokens(device), warm=warm, repeats=repeats
    )
    return {"way": way} | found


@dataclass(frozen=True)
class _Around:
    """What `hf_step.measure` takes for a keeper."""

    step: Step


def longest(way: str, shape: Slice, limit: int = LIMIT) -> dict[str, Any]:
    """The longest sequence of one way that fits `limit` bytes, in multiples of `GRAIN` tokens."""
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    ready = WAYS[way](partial(build, shape, CUDA, DTYPE))

    def peak(sequence: int) -> int | None:
        """Bytes of a step; None if it does not fit."""
        tokens = replace(shape, sequences=1, sequence=sequence).tokens(CUDA)
        keeper = _Around(ready.around)
        try:
            hf_step.step(ready.model, keeper, tokens)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            hf_step.step(ready.model, keeper, tokens)
            return torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            ready.model.zero_grad(set_to_none=False)
            hf_step.tidy(CUDA)
            return None

    low, high = (peak(each) for each in PROBES)
    if low is None or high is None:
        return {"longest": 0}
    each_token = (high - low) / (PROBES[1] - PROBES[0])
    tokens = int(PROBES[1] + (limit - high) / each_token) // GRAIN * GRAIN
    while tokens > PROBES[1] and peak(tokens) is None:
        tokens -= GRAIN * max(1, tokens // GRAIN // 32)
    return {"longest": tokens}


def in_process(way: str, *options: str) -> dict[str, Any] | None:
    """What a process of its own prints of a way; None, and why, where it does not run here."""
    command = [sys.executable, "-m", "benchmarks.rivals", "--way", way, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        print(f"{way}: not done after {PATIENCE} s", flush=True)
        return None
    if done.returncode:
        print(f"{way}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """No other way may be as fast as one of ours and as small."""
    theirs = [row for row in rows if not row["way"].startswith(OURS)]
    mine = [row for row in rows if row["way"].startswith(OURS)]
    return [
        Claim(
            what=f"{row['way']}: the fastest other way that takes no more memory, over its time",
            value=min(as_small) / row["ms"],
            bar=1.0,
            better="at least",
        )
        for row in mine
        if (as_small := [other["ms"] for other in theirs if other["gib"] <= row["gib"]])
    ]


# --- the pictures ---


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Time over memory, and the longest sequences, as SVG on a ground of their own."""
    timed = [row for row in rows if "ms" in row]
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {
        "svg.hashsalt": "pagestash",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
    }
    with rc_context(style):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        axes = figure.subplots()
        mine = sorted((row for row in timed if row["way"].startswith(OURS)), key=lambda row: row["gib"])
        others = [row for row in timed if not row["way"].startswith(OURS)]
        axes.scatter([row["gib"] for row in others], [row["ms"] for row in others], s=55, color=THEIRS)
        axes.plot([row["gib"] for row in mine], [row["ms"] for row in mine], "o-", color=COLOUR, markersize=8)
        for number, row in enumerate(timed):
            own = row["way"].startswith(OURS)
            # (Above the labels of points that are as good as in the same place.)
            beside = sum(
                abs(row["gib"] - other["gib"]) < 1 and abs(row["ms"] - other["ms"]) < 15
                for other in timed[:number]
            )
            # (Ours are close to each other, below all others: their labels rise.)
            axes.annotate(
                row["way"].removeprefix(f"{OURS}: "),
                (row["gib"], row["ms"]),
                (3, 5) if own else (7, 6 + 13 * beside),
                textcoords="offset points",
                color=COLOUR if own else INK,
                fontsize=8.5 if own else 9,
                rotation=26 if own else 0,
                rotation_mode="anchor",
            )
        axes.set_xlabel("peak above weights and gradients, GiB")
        axes.set_ylabel("forward and backward, ms")
        axes.set_xlim(0, 1.22 * max(row["gib"] for row in timed))
        axes.set_ylim(0)
        axes.set_title(f"{TITLE}: ours as a line", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        FigureCanvasSVG(figure).print_svg(folder / "rivals.svg", metadata={"Date": None})

        long = sorted((row for row in rows if row.get("longest")), key=lambda row: row["longest"])
        if not long:
            return
        figure = Figure(figsize=(9, 0.34 * len(long) + 1), layout="constrained")
        axes = figure.subplots()
        colours = [COLOUR if row["way"].startswith(OURS) else THEIRS for row in long]
        bars = axes.barh([row["way"] for row in long], [row["longest"] for row in long], color=colours)
        axes.bar_label(bars, fmt="{:,.0f}", padding=4)
        figure.suptitle(f"{TITLE}: the longest sequence that trains in 80 GiB, in tokens", fontsize=12)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_xticks([])
        FigureCanvasSVG(figure).print_svg(folder / "longest.svg", metadata={"Date": None})


def run(out: Path | None = None, quick: bool = False, longest: bool = False) -> Path:
    """What every way takes, or how far it goes; what a run of this commit has left in the file stays."""
    shape, options = QUICK if quick else Slice(), ["--quick"] if quick else []
    config = asdict(shape)
    rows = {row["way"]: row for row in begun("rivals", config=config, out=out)}
    what = "longest" if longest else "ms"

    def save() -> Path:
        found = [rows[way] for way in WAYS if way in rows]
        timed = [row for row in found if "ms" in row]
        return write("rivals", config=config, rows=found, claims=[] if quick else claims_of(timed), out=out)

    for way in sorted(WAYS, key=lambda way: "compile" in way or "Liger" in way):  # which take minutes: last
        row = rows.get(way, {"way": way})
        # (A plan is for one length, and a compiled layer would be compiled for each that is tried.)
        if what in row or (longest and ("planned" in way or "compile" in way)):
            continue
        if (found := in_process(way, *["--longest"] * longest, *options)) is not None:
            rows[way] = row | found
            unit = "tokens" if longest else f"ms{found['gib']:7.2f} GiB"
            print(f"{way:<42}{found[what]:10,.1f} {unit}", flush=True)
            save()
    return save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", required=True, choices=WAYS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--longest", action="store_true")
    chosen = parser.parse_args()
    shape, repeats = (QUICK, 3) if chosen.quick else (Slice(), 10)
    if chosen.longest:
        print(json.dumps(longest(chosen.way, shape)))
    else:
        print(json.dumps(measure(chosen.way, shape, warm=4, repeats=repeats)))
