"""The README's table of results, made from the claims in `benchmarks/results`."""

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
SIGNS = {"at most": "≤", "at least": "≥"}


def render(results: Path = RESULTS) -> str:
    """A Markdown table with a line for each claim, file by file in the order of their names."""
    lines = ["| what | seen | bar | machine |", "| --- | --- | --- | --- |"]
    for path in sorted(results.glob("*.json")):
        body = json.loads(path.read_text())
        machine = _machine(body["environment"], "jax" if body["benchmark"].startswith("jax") else "torch")
        for claim in body["claims"]:
            unit = f" {claim['unit']}" if claim["unit"] else ""
            # A bar that was missed stands in the table like the others.
            missed = "" if claim["holds"] else " (missed)"
            bar = f"{SIGNS[claim['better']]} {claim['bar']:g}{unit}"
            lines.append(
                f"| {_cell(claim['what'])} | {claim['value']:.4g}{unit}{missed} | {bar} | {machine} |"
            )
    return "\n".join(lines) if len(lines) > 2 else "No results yet: `make bench` on a machine with a GPU."


def replaced(text: str, table: str) -> str:
    """`text` with `table` between the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the text has no {BEGIN} … {END}: add the two markers where the table should stand")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def update(readme: Path = README, results: Path = RESULTS, *, check: bool = False) -> bool:
    """Write the table into the README, or with `check` only compare; whether it was stale."""
    old = readme.read_text()
    new = replaced(old, render(results))
    if new != old and not check:
        readme.write_text(new)
    return new != old


def _machine(environment: dict[str, Any], package: str) -> str:
    """The machine's name without its driver, the version of what it ran, and the commit."""
    name = environment["machine"].partition(",")[0]
    version = environment["versions"].get(package, "").partition("+")[0]
    ran = [f"{package} {version}"] if version else []
    return _cell(", ".join([name, *ran, environment["commit"][:7]]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
