"""`pagestash demo`: the tiny preset, trained with and without the stash policy.

In one process as many rows arrive as were sent, so the stash moves bytes and saves none: what it shows is that
nothing else changes. It saves where buffers are sized for the worst case, on the ranks of an expert-parallel job.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from pagestash.policy import format_bytes
from pagestash.train import prepare, read_metrics, train
from pagestash.train.metrics import Display, display

STASH = """\
[pool]
page = "16KiB"

[[rule]]
match = "layers.*.moe.experts"
home = "stash"
min_bytes = 4096
"""


def runs(steps: int, seed: int, folder: Path, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Train twice, in `folder`; the metrics of every step, by the run's name."""
    policy = folder / "stash.toml"
    policy.write_text(STASH)
    metrics = {}
    with display(console) as progress:
        for name, chosen in {"no stash": "none", "stash": str(policy)}.items():
            settings = {"steps": steps, "seed": seed, "policy": chosen}
            plan = prepare(settings, folder / name)
            train(plan, [Display(progress, f"{name:>8}", steps, 0)])
            metrics[name] = read_metrics(plan.out)
    return metrics


def main(steps: int, seed: int) -> bool:
    """Run both, show the table; False if a loss differs in a single bit."""
    console = Console()
    console.print(
        f"The tiny preset on the source of Python's standard library, {steps} steps, without the stash and with it"
    )
    with TemporaryDirectory() as folder:
        metrics = runs(steps, seed, Path(folder), console)
    table = Table(title="bytes that wait for backward, by home, at the most")
    for heading in ("", "keep", "stash", "together", "first loss", "last loss", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, lines in metrics.items():
        keep, stash = (max(line["saved_bytes"][home] for line in lines) for home in ("keep", "stash"))
        rate = sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)
        table.add_row(
            name,
            *(format_bytes(size) for size in (keep, stash, keep + stash)),
            f"{lines[0]['loss']:.6f}",
            f"{lines[-1]['loss']:.6f}",
            f"{rate:,.0f}",
        )
    console.print(table)
    plain, stashed = ([line["loss"] for line in lines] for lines in metrics.values())
    equal = plain == stashed and len(plain) == steps
    console.print(
        f"Losses of all {steps} steps are equal to the last bit: {'yes' if equal else 'NO'}.", soft_wrap=True
    )
    return equal
