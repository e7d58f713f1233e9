"""What a run tells: a JSON line a step, a progress line, TensorBoard where it is asked for."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagestash.policy import format_bytes

METRICS = "metrics.jsonl"


class Listener(Protocol):
    """Hears of every step, in order."""

    def step(self, line: Mapping[str, Any]) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one object a line, one line a step.

    A run that resumes drops what it is about to do again, so the file reads as if it had never stopped.
    """

    def __init__(self, run: Path, after: int) -> None:
        path = run / METRICS
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= after]
        partial = run / f".{METRICS}.partial"
        partial.write_text("".join(kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def step(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have the lines on disk, before a checkpoint that comes after them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars of each step."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"))

    def step(self, line: Mapping[str, Any]) -> None:
        for name in ("loss", "grad_norm", "lr"):
            self._writer.add_scalar(name, line[name], line["step"])
        self._writer.add_scalar("tokens_per_second", line["tokens"] / line["seconds"], line["step"])
        for home, size in line["saved_bytes"].items():
            self._writer.add_scalar(f"saved_bytes/{home}", size, line["step"])

    def close(self) -> None:
        self._writer.close()


class Display:
    """A progress line with loss, tokens a second, and bytes by home."""

    def __init__(self, progress: Progress, name: str, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total, completed=done, told="")

    def step(self, line: Mapping[str, Any]) -> None:
        homes = "  ".join(f"{home} {format_bytes(size)}" for home, size in line["saved_bytes"].items())
        told = f"loss {line['loss']:.4f}  {line['tokens'] / line['seconds']:,.0f} tokens/s  {homes}"
        self._progress.update(self._task, completed=line["step"], told=told)


@contextmanager
def display(console: Console) -> Iterator[Progress]:
    """Progress lines for as long as the block runs."""
    columns = [TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.fields[told]}"), console=console) as progress:
        yield progress


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run."""
    return [json.loads(line) for line in _whole_lines(run / METRICS)]


def _whole_lines(path: Path) -> list[str]:
    """Lines that were written to their end."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
