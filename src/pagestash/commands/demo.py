"""`pagestash demo`: train the tiny preset with and without a policy, its experts divided among ranks.

No rank knows how many rows it will receive, so its buffers have the worst-case size. Without a policy whole
buffers wait for backward. The policy stashes the received rows and recomputes the rest of each layer.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from pagestash.policy import format_bytes
from pagestash.train.metrics import read_metrics

POLICY = """\
[pool]
page = "16KiB"

[[rule]]
match = "layers.*.moe.experts"
home = "stash"
min_bytes = 4096

[[rule]]
match = "layers.*"
home = "recompute"
"""
WAITS = ("keep", "stash")
"""The homes that hold bytes at the peak; recomputed tensors exist only during their own layer's backward."""
SEQUENCES = 4
"""Per step, over all ranks."""


def runs(steps: int, seed: int, ranks: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train twice in `folder`: the metrics of every step, by the name of the run."""
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    metrics = {}
    for name, chosen in {"no policy": "none", "policy": str(policy)}.items():
        words = [
            "--preset",
            "tiny",
            "--steps",
            steps,
            "--policy",
            chosen,
            "--seed",
            seed,
            "--out",
            folder / name,
        ]
        words += ["--set", f"batch={SEQUENCES // ranks}", "--set", "device=cpu"]
        _train(list(map(str, words)), ranks)
        metrics[name] = read_metrics(folder / name)
    return metrics


def _train(words: list[str], ranks: int) -> None:
    """Run `pagestash train` on `ranks` processes; its progress is printed."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    # Interpreted kernels are for tests; on a CPU the torch references are much faster.
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", *launch, "pagestash", "train", *words],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        hint = "; --ranks 1 needs no communication between processes" if ranks > 1 else ""
        raise SystemExit(f"error: the training run ended with code {done.returncode}{hint}")


def main(steps: int, seed: int, ranks: int) -> bool:
    """Run both and print the table; False if any loss differs in a single bit."""
    console = Console()
    where = f"{ranks} CPU ranks that share its experts" if ranks > 1 else "the CPU"
    console.print(f"The tiny preset on {where}: {steps} steps without a policy, and {steps} with one.")
    with TemporaryDirectory() as folder:
        metrics = runs(steps, seed, ranks, Path(folder))
    table = Table(title="bytes that wait for backward on a rank, by home, at the most")
    for heading in ("", *WAITS, "together", "first loss", "last loss", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    together = []
    for name, lines in metrics.items():
        sizes = [max(line["saved_bytes"][home] for line in lines) for home in WAITS]
        rate = sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)
        together.append(sum(sizes))
        table.add_row(
            name,
            *(format_bytes(size) for size in (*sizes, sum(sizes))),
            f"{lines[0]['loss']:.6f}",
            f"{lines[-1]['loss']:.6f}",
            f"{rate:,.0f}",
        )
    console.print(table)
    plain, planned = ([line["loss"] for line in lines] for lines in metrics.values())
    equal = plain == planned and len(plain) == steps
    console.print(
        f"Losses of all {steps} steps are equal to the last bit: {'yes' if equal else 'NO'}. "
        f"Bytes that wait for backward: {together[1] / together[0]:.2f} of before.",
        soft_wrap=True,
    )
    return equal
