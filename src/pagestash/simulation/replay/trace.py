"""A replayed step as a Chrome trace: for chrome://tracing, or Perfetto's viewer.

A process is a rank, a thread one of its lanes, a counter its memory. Times are in microseconds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagestash.simulation.replay.played import Replay
from pagestash.simulation.replay.programs import COMMUNICATION

LANES = ("compute", "communication", "send", "out", "back")


def write_trace(step: Replay, path: Path) -> None:
    """Write the trace as JSON."""
    path.write_text(json.dumps({"traceEvents": list(events(step)), "displayTimeUnit": "ms"}))


def events(step: Replay) -> Iterator[dict[str, Any]]:
    """The trace's events, rank by rank."""
    for number, rank in enumerate(step.ranks):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"rank {number}"}}
        for lane, name in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": lane, "args": {"name": name}}
        for span in rank.spans:
            own = f" {span.stage}.{span.microbatch}" if span.stage >= 0 else ""
            yield {
                "ph": "X",
                "name": span.kind + own,
                "cat": span.kind,
                "pid": number,
                "tid": LANES.index(_lane(span.kind)),
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }
        for time, size in rank.memory:
            yield {"ph": "C", "name": "bytes", "pid": number, "ts": 1e6 * time, "args": {"allocated": size}}


def _lane(kind: str) -> str:
    if kind in COMMUNICATION:
        return "communication"
    return kind if kind in LANES else "compute"
