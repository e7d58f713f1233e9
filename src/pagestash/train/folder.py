"""The folder of a run: a lock, so that one process writes there, and the run's settings."""

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
    """Something outside the program ended the run; the message is one sentence."""


def reason(error: Exception) -> str:
    """The operating system's message, without the error number."""
    strerror = getattr(error, "strerror", None)
    return str(strerror or error)


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Make the folder if needed, and lock it for this process.

    The operating system holds the lock (flock) and releases it when the process ends, even by a crash.
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
                f"{out}: the folder cannot be locked ({reason(error)}); start no second run there",
                stacklevel=2,
            )
        with suppress(OSError):  # a full disk; the text only informs people, and the lock is held
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a run was started or last resumed with; written before its first step."""

    config: Mapping[str, Any]
    corpus: str
    """The digest of its text."""
    checkpoint: int | None = None
    """The step of the last checkpoint that was written."""


def write_settings(out: Path, settings: Settings) -> None:
    """Write `settings.json` atomically."""
    values = {"checkpoint": settings.checkpoint, "corpus": settings.corpus, "config": dict(settings.config)}
    # As they are read back from JSON, where a tuple becomes a list.
    values = json.loads(json.dumps(values))
    write_whole(out / SETTINGS, json.dumps({"sha256": _digest(values), **values}, indent=2) + "\n")


def read_settings(out: Path) -> Settings | None:
    """The settings of the run in `out`; None if there is none."""
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
    """Write a file atomically: if the process dies, the old or the new contents are there."""
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
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
