"""Checkpoints: tensors in safetensors, counters in JSON, in a folder that is whole or not there.

A checkpoint is written beside its place, synced, and renamed into it: a process that dies at any moment
leaves the one before. Neither format can hold code.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FOLDER = "checkpoints"
_PARTIAL = ".partial-"


def save(
    run: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Any, keep: int
) -> Path:
    """Write `step-N` with one file for each group of tensors, then let all but the last `keep` go."""
    folder = run / FOLDER
    final = folder / f"step-{step:08d}"
    if final.exists():  # the same step of the same run
        return final
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)
    partial = folder / f"{_PARTIAL}{step:08d}"
    partial.mkdir()
    for name, group in tensors.items():
        path = partial / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in group.items()}, path)
        _sync(path)
    path = partial / "state.json"
    path.write_text(json.dumps(state, indent=2) + "\n")
    _sync(path)
    _sync(partial)
    os.rename(partial, final)
    _sync(folder)
    for old in _all(run)[:-keep]:
        _discard(old)
    return final


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    found = _all(run)
    return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The counters."""
    try:
        return json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {checkpoint}: state.json cannot be read ({error})") from error


def shapes(checkpoint: Path, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a group of tensors, from the file's head alone."""
    try:
        with safe_open(checkpoint / f"{name}.safetensors", "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint {checkpoint}: {name}.safetensors cannot be read ({error})") from error


def check_shapes(checkpoint: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another model, naming the first difference."""
    found = shapes(checkpoint, "model")
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {checkpoint} is of another shape: {name} is {_shape(found.get(name))} there and "
                f"{_shape(expected.get(name))} in this model"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "a number"


def _all(run: Path) -> list[Path]:
    return sorted((run / FOLDER).glob("step-*"))


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint; it stops being one before its first file goes."""
    gone = checkpoint.with_name(f"{_PARTIAL}{checkpoint.name}")
    os.rename(checkpoint, gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
