"""A step that finds no memory: `Keeper(budget="auto")` trains it, as fast as a plan made with all memory there.

    python -m benchmarks out_of_memory

One sequence of 32,768 tokens through four layers of Qwen3-30B-A3B in transformers, after `pagestash.hf.optimize`.
The same weights and tokens run in three ways, each in a process of its own:

- without a limit and without a plan;
- under a limit (`torch.cuda.set_per_process_memory_fraction`): weights, gradients and 7 GiB are there, and the step
  takes 11. It is measured while its layers are recomputed. Of all that is there, "auto" leaves a part free;
- without a limit, planned for the budget that "auto" came to.

A step is a forward and a backward that adds to gradients which are there. Memory is the peak above weights and
gradients. Losses must have the same bits. Norms of gradients may differ a little: attention adds its own up in any
order.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import pagestash as ps
from benchmarks.harness import Claim, write
from benchmarks.hf_step import GIB, Slice, build, held_bytes, optimized, step, tidy, timed

PLAIN, LIMITED, PLANNED = (
    "no limit, no plan",
    'under the limit, Keeper(budget="auto")',
    "no limit, planned for the same budget",
)
WAYS = (PLAIN, LIMITED, PLANNED)
WARM = 4
"""The first step is noted, the second begins with the plan and is the first under it, the third goes by it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Slice
    room: int
    """Bytes above weights and gradients that are there under the limit."""


FULL = Case(shape=Slice(layers=4, sequences=1, sequence=32768), room=7 * GIB)
QUICK = Case(shape=Slice(layers=4, sequences=1, sequence=8192, experts=16), room=7 * GIB // 4)


def measure(
    way: str, case: Case, device: torch.device, dtype: torch.dtype, *, repeats: int, **planned: Any
) -> dict[str, Any]:
    """The row of a way, in this process. `planned`: what its keeper takes; nothing without one."""
    model, _ = optimized(build(case.shape, device, dtype, "pagestash"))
    tokens = case.shape.tokens(device)
    held = 2 * sum(each.nbytes for each in model.parameters())
    if way == LIMITED and device.type == "cuda":
        limit(held + case.room, device)
    told(f"{way}: weights and gradients take {held / GIB:.2f} GiB")
    keeper = ps.Keeper(**planned, progress=_Progress()).attach(model) if planned else None
    took = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(WARM):
            begun = time.perf_counter()
            loss = step(model, keeper, tokens).item()
            took.append(time.perf_counter() - begun)
            told(f"step {len(took)}: {took[-1]:.2f} s, loss {loss:.5f}")
        row: dict[str, Any] = {"way": way, "warm_seconds": took, "held_bytes": held}
        if keeper is not None:
            row |= plan_of(keeper)
        row |= steady(model, keeper, tokens, repeats=repeats)
    row["warnings"] = list(dict.fromkeys(str(each.message) for each in warned))
    for sentence in row["warnings"]:
        told(f"warned: {sentence}")
    if keeper is not None:
        keeper.detach()
    del keeper
    if way == LIMITED:
        row["fits_without"] = fits_without(model, tokens)
    return row


def limit(total: int, device: torch.device) -> None:
    """This process may have so many bytes of the GPU."""
    tidy(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(total / memory, device)


def plan_of(keeper: ps.Keeper) -> dict[str, Any]:
    """What was planned, and predicted."""
    plan = keeper.plan
    if plan is None:
        raise RuntimeError("the keeper has made no plan")
    told(str(plan))
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_ms": 1000 * plan.predicted.seconds,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "unplanned_ms": 1000 * plan.unplanned.seconds,
        "unplanned_peak_bytes": plan.unplanned.peak_bytes,
        "checked_bytes": plan.measured_bytes,
        "planned_for": plan.planned_for,
        "recomputed_layers": plan.recomputed_layers,
        "rules": [f"{rule.match} {rule.home} {rule.fraction:g}" for rule in plan.policy.rules],
        "notes": list(plan.notes),
    }


def steady(model: Any, keeper: ps.Keeper | None, tokens: torch.Tensor, *, repeats: int) -> dict[str, Any]:
    """Milliseconds (the median of the faster of two rounds), the peak, the loss, and the norms of gradients."""
    device = tokens.device
    retries = 0
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    rounds = [timed(lambda: step(model, keeper, tokens), tokens, warm=2, repeats=repeats) for _ in range(2)]
    row: dict[str, Any] = {"ms": min(map(statistics.median, rounds)), "round_ms": rounds}
    if tokens.is_cuda:
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        row["gib"] = (row["peak_bytes"] - held_bytes(model)) / GIB
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        row["alloc_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"] - retries
    model.zero_grad(set_to_none=False)
    row["loss"] = step(model, keeper, tokens).item()
    row["norms"] = {
        name: torch.linalg.vector_norm(each.grad, dtype=torch.float32).item()
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    told(
        f"{row['ms']:.1f} ms, {row.get('gib', 0):.2f} GiB above weights and gradients, loss {row['loss']:.5f}"
    )
    return row


def fits_without(model: Any, tokens: torch.Tensor) -> bool:
    """Whether the step finds memory without a keeper."""
    tidy(tokens.device)
    try:
        step(model, None, tokens)
    except torch.OutOfMemoryError:
        return False
    return True


class _Progress:
    """Prints what a plan is doing, once each."""

    def __init__(self) -> None:
        self.begun, self.last = time.perf_counter(), ""

    def __call__(self, what: str, number: int, total: int) -> None:
        if what != self.last:
            self.last = what
            told(f"planning, after {time.perf_counter() - self.begun:.1f} s: {what}")


def told(line: str) -> None:
    """Progress; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def in_process(way: str, quick: bool, budget: str | int | None) -> dict[str, Any]:
    """The row of a way from a process of its own; of one that failed, the error."""
    command = [sys.executable, "-m", "benchmarks.out_of_memory", "--way", way]
    command += ["--quick"] * quick + ([] if budget is None else ["--budget", str(budget)])
    begun = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    told(f"{way}: the process took {time.perf_counter() - begun:.1f} s\n")
    if not done.stdout.strip():
        return {"way": way, "error": f"the process ended with {done.returncode}"}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def claims_of(rows: list[dict[str, Any]], case: Case) -> list[Claim]:
    """What is promised of the step under a limit; rows of the other ways are whole."""
    where = (
        f"{case.shape.layers} layers, {case.shape.sequence:,} tokens, {case.room / GIB:g} GiB for the step: "
    )
    by = {row["way"]: row for row in rows}
    limited = by[LIMITED]
    runs = [("it trains without an error", "error" not in limited)]
    if "error" in limited:
        return [_is_so(where + what, holds) for what, holds in runs]
    runs.append(("without a keeper it finds no memory", not limited["fits_without"]))
    plain, planned = by[PLAIN], by[PLANNED]
    figures = [
        ("peak over the budget", limited["peak_bytes"] / limited["budget_bytes"], 1.0),
        ("time over that of a plan made with all memory there", limited["ms"] / planned["ms"], 1.05),
        ("loss apart from the other ways", max(abs(limited["loss"] - row["loss"]) for row in rows), 0.0),
        (
            "norm of a parameter's gradient, furthest from that without a plan",
            norms_apart(limited["norms"], plain["norms"]),
            0.01,
        ),
    ]
    return [_is_so(where + what, holds) for what, holds in runs] + [
        Claim(what=where + what, value=value, bar=bar, better="at most") for what, value, bar in figures
    ]


def _is_so(what: str, holds: bool) -> Claim:
    return Claim(what=f"{what} (1: yes)", value=float(holds), bar=1.0, better="at least")


def norms_apart(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """The largest part by which the norms of a parameter's gradients differ; infinite if one has none."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max(abs(ours[name] - norm) / norm if norm else ours[name] for name, norm in theirs.items())


def run(out: Path | None = None, quick: bool = False) -> Path:
    """The last way gets the budget of the one under the limit; where that fails, it does not run.

    The file is written after each way, because a run of minutes may be cut off.
    """
    case = QUICK if quick else FULL
    config = asdict(case.shape) | {"room_bytes": case.room, "quick": quick}
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        budget = None if way == PLAIN else "auto" if way == LIMITED else rows[-1]["budget_bytes"]
        rows.append(in_process(way, quick, budget))
        row = rows[-1]
        print(shown(row), flush=True)
        failed = "error" in row
        if failed and way != LIMITED:
            raise RuntimeError(f"{way}: {row['error']}")
        claims = claims_of(rows, case) if failed or way == PLANNED else []
        path = write("out_of_memory", config=config, rows=rows, claims=claims, out=out)
        if failed:
            break
    return path


def shown(row: dict[str, Any]) -> str:
    """One line of a row."""
    if "error" in row:
        return f"{row['way']}: {row['error']}"
    line = f"{row['way']:<40}{row['ms']:8.1f} ms{row.get('gib', 0):7.2f} GiB  loss {row['loss']:.5f}"
    if "budget_bytes" in row:
        budget, peak = (
            (row[name] - row["held_bytes"]) / GIB for name in ("budget_bytes", "predicted_peak_bytes")
        )
        line += f"  budget {budget:.2f} GiB, predicted {row['predicted_ms']:.1f} ms, {peak:.2f} GiB"
    return line


def main() -> None:
    """One way; its row, or its error, is the last line of stdout."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--way", required=True, choices=WAYS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget")
    chosen = parser.parse_args()
    budget = chosen.budget
    planned = {} if budget is None else {"budget": int(budget) if budget.isdecimal() else budget}
    case, repeats = (QUICK, 3) if chosen.quick else (FULL, 5)
    try:
        row = measure(chosen.way, case, torch.device("cuda", 0), torch.bfloat16, repeats=repeats, **planned)
    except Exception as error:
        traceback.print_exc()
        row = {"way": chosen.way, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
