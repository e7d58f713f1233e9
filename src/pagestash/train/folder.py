"""The folder of a run: one process writes in it, and it knows the settings that the run was begun with."""

import errno
import fcntl
import hashlib
import json
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK = ".lock"
SETTINGS = "settings.json"
_HELD = (errno.EAGAIN, errno.EACCES)


class RunError(ValueError):
    """What ends a run and is no fault of the program, in one sentence."""


def reason(error: Exception) -> str:
    """What the system says of a file, without the number of the error."""
    strerror = getattr(error, "strerror", None)
    return str(strerror or error)


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Make the folder if need be, and have it for this process alone.

    The lock is the kernel's (flock): it ends with the process, however that ends.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RunError(f"--out {out}: it cannot be written to ({reason(error)})") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                who = f" ({holder})" if holder else ""
                raise RunError(
                    f"--out {out}: another run{who} is writing there; wait for its end, or choose another folder"
                ) from None
            warnings.warn(
                f"{out}: no lock can be had there ({reason(error)}); start no second run", stacklevel=2
            )
        with suppress(OSError):  # a full disk; the text is for people, the lock is held
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was begun with, or last resumed with; written before its first step."""

    config: Mapping[str, Any]
    corpus: str
    """The digest of its text."""
    checkpoint: int | None = None
    """The step of the last checkpoint that was written."""


def write_settings(out: Path, settings: Settings) -> None:
    """Put `settings.json` in its place, whole."""
    values = {"checkpoint": settings.checkpoint, "corpus": settings.corpus, "config": dict(settings.config)}
    # As JSON gives them back: a tuple is a list there.
    values = json.loads(json.dumps(values))
    write_whole(out / SETTINGS, json.dumps({"sha256": _digest(values), **values}, indent=2) + "\n")


def read_settings(out: Path) -> Settings | None:
    """The settings of the run in `out`; None if an older version, or nothing, ran there."""
    path = out / SETTINGS
    try:
        values = json.loads(path.read_bytes())
        digest, config, corpus, step = (
            values.pop(key) for key in ("sha256", "config", "corpus", "checkpoint")
        )
        if values:
            raise ValueError(f"unknown key {next(iter(values))!r}")
        if digest != _digest({"checkpoint": step, "corpus": corpus, "config": config}):
            raise ValueError("it was changed; settings are changed with --set")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else reason(error)
        raise RunError(
            f"{path} cannot be read ({told}); without that file, --resume takes the settings of the last checkpoint"
        ) from error
    return Settings(config, corpus, step)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as it was or as it is to be, whenever the process dies."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RunError(f"{path} cannot be written ({reason(error)})") from error
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
