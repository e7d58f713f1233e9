"""What every benchmark shares: where it ran, what it claims, and the file it leaves.

A result file is JSON with the machine, the versions and the commit, the configuration, one row a
measurement, and the claims: each figure the project promises, the bar it has to clear, and what was seen.
docs/results.md is made from the claims of all files, and so is the README's table (`python -m benchmarks table`).
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"
VERSIONED = ("torch", "triton", "jax", "jaxlib", "flax", "transformers")


class UnknownPreset(ValueError):
    """A benchmark has no case of that name."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One promised figure: `value` has to be at most, or at least, `bar`."""

    what: str
    value: float
    bar: float
    better: Literal["at most", "at least"]
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.bar if self.better == "at most" else self.value >= self.bar


def environment() -> dict[str, Any]:
    """Machine, versions and commit; imports none of the libraries it names."""
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": _first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        or f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        # Where the tree travels without its history, the caller names the commit.
        "commit": os.environ.get("PAGESTASH_COMMIT") or _first_line("git", "rev-parse", "--short=12", "HEAD"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write(
    name: str,
    *,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    claims: list[Claim],
    out: Path | None = None,
) -> Path:
    """Write `<out>/<name>.json` and return its path; `out` defaults to `benchmarks/results`."""
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    body = {
        "benchmark": name,
        "environment": environment(),
        "config": config,
        "rows": rows,
        "claims": [asdict(claim) | {"holds": claim.holds} for claim in claims],
    }
    # At once: a run that is cut off leaves a whole file.
    path.with_suffix(".part").write_text(json.dumps(body, indent=1) + "\n")
    path.with_suffix(".part").replace(path)
    return path


def begun(name: str, *, config: dict[str, Any], out: Path | None = None) -> list[dict[str, Any]]:
    """The rows that a run of this commit, on such a machine and with this configuration, has left in its file."""
    path = (out or RESULTS) / f"{name}.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    same = ("machine", "versions", "commit")
    here = environment()
    alike = all(found["environment"][key] == here[key] for key in same)
    return found["rows"] if alike and found["config"] == json.loads(json.dumps(config)) else []


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
