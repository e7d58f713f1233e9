"""Simulated steps against published and measured ones, by the rules of docs/simulate.md.

Two constants are fitted, each to one row: those of `[calibration]` in the files of H100 and GB200.

Every part has `rows()` and `claims(rows)`.
"""

from pathlib import Path

from benchmarks import simulated_memory, simulated_time
from benchmarks.harness import Claim, write
from benchmarks.simulated import Row

PARTS = (simulated_memory, simulated_time)


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Predict every row, print it, and write the result; `quick` changes nothing, for nothing runs."""
    rows: list[Row] = []
    claims: list[Claim] = []
    for part in PARTS:
        found = part.rows()
        rows += found
        claims += part.claims(found)
    for row in rows:
        print(line(row))
    config = {"rules": "docs/simulate.md"}
    return write("simulate", config=config, rows=[row.to_json() for row in rows], claims=claims, out=out)


def line(row: Row) -> str:
    verdict = {None: "      ", True: "holds ", False: "MISSED"}[row.holds]
    told, found = f"{row.published:.5g}", f"{row.predicted:.5g} {row.unit}"
    cause = f"  ({row.cause})" if row.cause and not row.holds else ""
    return f"{verdict} {row.error:+8.2%}  {told:>9} -> {found:<13} {row.what}{cause}"
