"""The text files to train on, as bytes, and the windows that each step reads."""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """All files, one after the other; `digest` identifies the contents."""

    data: torch.Tensor
    """uint8, one element per byte."""
    files: int
    digest: str

    def windows(self, step: int, seed: int, count: int, length: int, first: int, last: int) -> torch.Tensor:
        """Windows `first` to `last` of the `count` that all ranks read in `step`: int64 [last - first, length].

        The position in the data depends on seed and step alone: resuming needs no other state.
        """
        generator = torch.Generator().manual_seed(_mix(seed, step))
        starts = torch.randint(self.data.numel() - length + 1, (count,), generator=generator)
        at = starts[first:last, None] + torch.arange(length)
        return self.data[at].to(torch.int64)


def load_corpus(paths: Sequence[str | Path], length: int) -> Corpus:
    """Read text files, and those in folders, sorted by name; raise if they are shorter than one window."""
    files = [file for path in paths for file in _files(Path(path))] if paths else standard_library()
    parts, digest = [], hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"corpus {file}: {error.strerror}") from error
        digest.update(content)
        parts.append(content)
    whole = b"".join(parts)
    where = ", ".join(str(path) for path in paths) or "the standard library"
    if not whole:
        raise ValueError(f"corpus {where}: it is empty")
    if len(whole) < length:
        raise ValueError(f"corpus {where}: {len(whole)} bytes are less than one window of {length}")
    # A writable copy: torch warns about tensors over read-only memory.
    return Corpus(torch.frombuffer(bytearray(whole), dtype=torch.uint8), len(files), digest.hexdigest())


def standard_library() -> list[Path]:
    """The source files of Python's standard library, without its tests, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = root.rglob("*.py")
    return sorted(file for file in found if not _NOT_OURS & set(file.relative_to(root).parts))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        return sorted(f for f in inside if not any(p.startswith(".") for p in f.relative_to(path).parts))
    if not path.exists():
        raise ValueError(f"corpus {path}: no such file or folder")
    return [path]


def _mix(seed: int, step: int) -> int:
    """A seed for one step; neighbouring seeds or steps give unrelated results."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:8], "big") >> 1
