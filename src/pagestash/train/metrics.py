"""What a run reports: one JSON line per step, a progress line, and TensorBoard if enabled."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pagestash.sizes import format_bytes
from pagestash.train.folder import RunError, reason, write_whole

METRICS = "metrics.jsonl"


class StepListener(Protocol):
    """Is told about every step, in order."""

    def step(self, line: Mapping[str, Any]) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one JSON object per line, one line per step.

    A resumed run first removes the lines after its checkpoint, so the file reads as if it had never stopped.
    """

    def __init__(self, run: Path, after: int) -> None:
        path = run / METRICS
        lines, _ = recorded(run)
        write_whole(path, "".join(text for step, text in lines if step <= after))
        # Unbuffered: closing has nothing left to write, which would fail again on a full disk.
        self._file = path.open("ab", buffering=0)

    def step(self, line: Mapping[str, Any]) -> None:
        rest = memoryview((json.dumps(_finite(line)) + "\n").encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Sync the lines to disk; called before a checkpoint is written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes each step's scalars for TensorBoard."""

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


class _TwoLines(Progress):
    """A bar, and below it what is told of the last step: beside it a terminal of 80 columns has no room."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            yield Text(task.fields["told"])


class Display:
    """A bar, and loss, tokens per second, and bytes in each home that holds any."""

    def __init__(self, progress: Progress, name: str, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total, completed=done, told="")

    def step(self, line: Mapping[str, Any]) -> None:
        held = {home: size for home, size in line["saved_bytes"].items() if size}
        homes = "  ".join(f"{home} {format_bytes(size)}" for home, size in held.items())
        told = f"loss {line['loss']:.4f}  {line['tokens'] / line['seconds']:,.0f} tokens/s  {homes}"
        self._progress.update(self._task, completed=line["step"], told=told)


@contextmanager
def display(console: Console) -> Iterator[Progress]:
    """A bar for as long as the block runs."""
    columns = [TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()]
    with _TwoLines(*columns, console=console) as progress:
        yield progress


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run."""
    return [json.loads(text) for _, text in recorded(run)[0]]


def recorded(run: Path) -> tuple[list[tuple[int, str]], bool]:
    """The step and text of every line, and whether a last line is incomplete, as after a kill.

    Any other line that cannot be parsed raises `RunError` with its number.
    """
    path = run / METRICS
    try:
        *whole, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise RunError(f"{path} cannot be read ({reason(error)})") from error
    lines: list[tuple[int, str]] = []
    for number, raw in enumerate(whole, start=1):
        step = _step_of(raw)
        if step is None or (lines and step <= lines[-1][0]):
            told = (
                "is no line of a run"
                if step is None
                else f"is of step {step}, after one of step {lines[-1][0]}"
            )
            shown = raw[:40].decode(errors="backslashreplace")
            raise RunError(f"{path}, line {number} {told}: {shown!r}; mend it, or move the file away")
        lines.append((step, raw.decode() + "\n"))
    return lines, bool(torn)


def _step_of(raw: bytes) -> int | None:
    try:
        step = json.loads(raw.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
