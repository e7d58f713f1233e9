"""Sizes in bytes: as text, and what this machine has."""

import math
import operator
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 2**63 - 1
"""Sizes are counted in int64 on the device."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", start=1)
}
"""In small letters: no unit means two things by its case."""


WITH_UNIT = "a number with a unit, like '64KiB', '8GiB' or '2GB'"


def parse_bytes(text: str | int, what: str = "size", expected: str = WITH_UNIT) -> int:
    """Bytes of `"64KiB"`, `"1.5 gib"`, `"2GB"`, `"8e9"` or a number; else an error that says what is expected.

    >>> parse_bytes("64KiB")
    65536
    """
    refusal = ValueError(f"{what}={text!r}: expected {expected}")
    value: Any = text
    if isinstance(text, str):
        found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", text)
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise refusal
        amount = float(found[1]) * unit
        if unit == 1 and not amount.is_integer():
            raise refusal  # a part of a byte
        size = round(amount) if math.isfinite(amount) else MOST_BYTES + 1
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    elif isinstance(value, bool):
        raise refusal
    else:
        try:
            size = operator.index(value)
        except TypeError:
            raise refusal from None
    if size < 0:
        raise ValueError(f"{what}={text!r}: expected 0 or more")
    if size > MOST_BYTES:
        raise ValueError(f"{what}={text!r}: expected less than {format_bytes(MOST_BYTES)}")
    return size


def format_bytes(size: float) -> str:
    """A readable size: `format_bytes(1536)` is `'1.5 KiB'`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def machine_memory() -> int:
    """Bytes of memory that this machine has, or that this process's cgroup may use, as in a container."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()])


def host_share() -> int:
    """Bytes that this process may pin by default: half of the machine's, divided by the ranks on it."""
    return machine_memory() // 2 // _ranks_here()


def _ranks_here() -> int:
    """Ranks on this machine, as torchrun says; else those of torch.distributed, but no more than there are GPUs."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal():
        return max(1, int(told))
    torch = sys.modules.get("torch")  # without it there are no ranks
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    ranks = torch.distributed.get_world_size()
    return min(ranks, torch.cuda.device_count() or ranks)


def _cgroup_limits(
    mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """The memory limits of this process's cgroups and of those above them, of version 1 or 2."""
    if not own.exists():  # not Linux
        return
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = (mounts / "memory", "memory.limit_in_bytes") if controllers else (mounts, "memory.max")
        # In a container, the path may be the host's, and the mount is then the cgroup itself.
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):
            with suppress(OSError):
                limit = mount.joinpath(*parts[:depth], name).read_text().strip()
                if limit.isdecimal():  # else "max"
                    yield int(limit)
