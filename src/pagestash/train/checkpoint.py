"""Checkpoints: tensors in safetensors, counters in JSON, in a folder that is complete or absent.

A checkpoint is written to a temporary folder, synced, and renamed: a process that dies at any moment leaves the
previous checkpoint intact. Neither format can hold code. `checksums.json` has the SHA-256 of every other file,
computed from the written file: a byte that changed later, or a file of another step, is found before anything
is loaded.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pagestash.train.folder import RunError, reason, sync

FOLDER = "checkpoints"
CHECKSUMS = "checksums.json"
STATE = "state.json"
FORMAT = 2
"""Written to a checkpoint's state. Format 1, or none, has no checksums."""
_PARTIAL = ".partial-"


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `step-N` with one file per group of tensors, then delete all but the last `keep` checkpoints.

    If that fails (a full disk), it raises `RunError`, and the earlier checkpoints remain.
    """
    folder = run / FOLDER
    final = folder / f"step-{step:08d}"
    if final.is_dir():  # the same step of the same run
        return final
    partial = folder / f"{_PARTIAL}{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rest in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        partial.mkdir()
        _write(partial, tensors, {"format": FORMAT, **state})
        os.rename(partial, final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
        last = latest(run)
        left = "there is none before it" if last is None else f"the last whole one is {last.name}"
        raise RunError(f"checkpoint {final} cannot be written ({reason(error)}); {left}") from error
    for old in _all(run)[:-keep]:
        _discard(old)
    return final


def _write(folder: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]) -> None:
    for name, group in tensors.items():
        path = folder / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in group.items()}, path)
        sync(path)
    _write_json(folder / STATE, state)
    _write_json(folder / CHECKSUMS, {path.name: _digest(path) for path in sorted(folder.iterdir())})
    sync(folder)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
    sync(path)


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = _all(run)
    return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The counters and settings in a checkpoint."""
    try:
        return _state(checkpoint)
    except _Damage as damage:
        raise _refusal(checkpoint, damage) from damage


def verify(checkpoint: Path) -> None:
    """Check every file against its checksum; a `RunError` names the first bad file and the last good checkpoint."""
    try:
        _verify(checkpoint)
    except _Damage as damage:
        raise _refusal(checkpoint, damage) from damage


def shapes(checkpoint: Path, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a group of tensors, read from the file's header."""
    try:
        return _shapes(checkpoint, name)
    except _Damage as damage:
        raise _refusal(checkpoint, damage) from damage


def check_shapes(checkpoint: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if the checkpoint is of a model with other shapes, naming the first difference."""
    found = shapes(checkpoint, "model")
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {checkpoint} is of another shape: {name} is {_shape(found.get(name))} there and "
                f"{_shape(expected.get(name))} in this model"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "a number"


class _Damage(Exception):
    """What is wrong with one file of a checkpoint."""


def _state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _Damage(f"{STATE} cannot be read ({reason(error)})") from error
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, int) or step != _step(checkpoint):
        raise _Damage(f"{STATE} is not of this step")
    _check_digest(path, _checksums(checkpoint))
    if state.get("format") != FORMAT:
        raise _Damage(f"format {state.get('format')!r} is of another version of pagestash")
    return state


def _checksums(checkpoint: Path) -> dict[str, str]:
    try:
        found = json.loads((checkpoint / CHECKSUMS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _Damage(f"{CHECKSUMS} cannot be read ({reason(error)})") from error
    if not isinstance(found, dict):
        raise _Damage(f"{CHECKSUMS} is not a table")
    return found


def _verify(checkpoint: Path) -> None:
    files = sorted(path for path in checkpoint.glob("*.safetensors"))
    _state(checkpoint)
    known = _checksums(checkpoint)
    for name in sorted({*known, *(path.name for path in files)}):
        _check_digest(checkpoint / name, known)


def _check_digest(path: Path, known: Mapping[str, str]) -> None:
    try:
        found = _digest(path)
    except OSError as error:
        raise _Damage(f"{path.name} cannot be read ({reason(error)})") from error
    if known.get(path.name) != found:
        raise _Damage(f"{path.name} is not what was written (its checksum differs)")


def _shapes(checkpoint: Path, name: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(checkpoint / f"{name}.safetensors", "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _Damage(f"{name}.safetensors cannot be read ({reason(error)})") from error


def _refusal(checkpoint: Path, damage: _Damage) -> RunError:
    """An error that names the damage and the last intact checkpoint."""
    for before in reversed(_all(checkpoint.parent.parent)):
        if _step(before) >= _step(checkpoint):
            continue
        try:
            _verify(before)
        except _Damage:
            continue
        way = f"{before.name} before it is whole: move {checkpoint.name} away, and --resume continues from there"
        return RunError(f"checkpoint {checkpoint}: {damage}; {way}")
    return RunError(f"checkpoint {checkpoint}: {damage}; there is no whole one before it")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _all(run: Path) -> list[Path]:
    """Checkpoints in the order of their steps; other files in the folder are ignored."""
    try:
        found = [path for path in (run / FOLDER).iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=_step)


_NAME = re.compile(r"step-(\d{8,})", re.ASCII)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed before its first file is deleted."""
    gone = checkpoint.with_name(f"{_PARTIAL}{checkpoint.name}")
    os.rename(checkpoint, gone)
    shutil.rmtree(gone)
