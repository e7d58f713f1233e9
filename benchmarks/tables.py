"""Tables of results, made from `benchmarks/results`: those of docs/results.md, and the README's."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

ROOT = Path(__file__).parent.parent
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
GIB = 1 << 30
BEGIN, END = "<!-- results -->", "<!-- /results -->"
Rows = Sequence[dict[str, Any]]
SIGNS = {"at most": "≤", "at least": "≥"}
NONE_YET = "No results yet: `make bench` on a machine with a GPU."


def render(results: Path = RESULTS) -> str:
    """For each benchmark, in the order of their names: where it ran, a line for each claim, and its rows."""
    parts = []
    for path in sorted(results.glob("*.json")):
        body = json.loads(path.read_text())
        name = body["benchmark"]
        lines = [f"## {name}", "", _machine(body["environment"], *_packages(name))]
        lines += ["", "| what | seen | bar |", "| --- | --- | --- |"]
        for claim in body["claims"]:
            unit = f" {claim['unit']}" if claim["unit"] else ""
            bar = f"{SIGNS[claim['better']]} {claim['bar']:g}{unit}"
            lines.append(f"| {_cell(claim['what'])} | {_seen(claim)} | {bar} |")
        if name in ROWS:
            lines += ["", *ROWS[name](body["rows"])]
        if body["claims"]:
            parts.append("\n".join(lines))
    return "\n\n".join(parts) or NONE_YET


def rivals(results: Path = RESULTS) -> str:
    """The README's table: a line for each way of `benchmarks.rivals`; until that was run, of `hf_step`."""
    name = next((each for each in ("rivals", "hf_step") if (results / f"{each}.json").exists()), None)
    if name is None:
        return NONE_YET
    body = json.loads((results / f"{name}.json").read_text())
    rows = [row for row in body["rows"] if "gib" in row and not row["way"].startswith("gpt-oss")]
    lines = ["| | ms | peak, GiB |", "| --- | --- | --- |"]
    for row in rows:
        mark = "*" if "commit" in row else ""
        lines.append(f"| {_cell(row['way'])}{mark} | {row['ms']:.0f} | {row['gib']:.2f} |")
    where = _machine(body["environment"], *_packages("hf"))
    where += "".join(
        f" (\\*: {each[:7]})" for each in sorted({row["commit"] for row in rows if "commit" in row})
    )
    what = (
        "Qwen3-30B-A3B, 8 layers: forward and backward of 2 × 4,096 tokens, peak above weights and gradients"
    )
    return "\n".join([*lines, "", f"{what}; {where}: `python -m benchmarks {name}`."])


def lengths(rows: Rows) -> Iterator[str]:
    """A line for each way of `benchmarks.rivals` of which it was measured how far it goes."""
    yield from ("| | longest sequence in 80 GiB, tokens |", "| --- | ---: |")
    yield from (f"| {_cell(row['way'])} | {row['longest']:,} |" for row in rows if "longest" in row)


def hugging_face(rows: Rows) -> Iterator[str]:
    """A line for each way of `benchmarks.hf_step` or `hf_lora`."""
    yield from ("| | ms | ms, fresh gradients | peak, GiB | products by |", "| --- | --- | --- | --- | --- |")
    for row in rows:
        fresh, gib = (
            f"{row[key]:.{digits}f}" if key in row else "" for key, digits in (("fresh_ms", 1), ("gib", 2))
        )
        yield f"| {_cell(row['way'])} | {row['ms']:.1f} | {fresh} | {gib} | {_multiplied_by(row)} |"


def in_megatron(rows: Rows) -> Iterator[str]:
    """A line for each way of `benchmarks.megatron`."""
    yield from ("| | ms | peak, GiB |", "| --- | --- | --- |")
    yield from (f"| {_cell(row['way'])} | {row['ms']:.0f} | {row['gib']:.2f} |" for row in rows)


def pairs(rows: Rows) -> Iterator[str]:
    """A line for each model and rate of `benchmarks.overlap`, in milliseconds."""
    names = (
        "in sequence",
        "overlapped",
        "wire each way",
        "compute forward",
        "compute backward",
        "host, ms a layer",
    )
    yield f"| | {' | '.join(names)} |"
    yield f"| --- |{' --- |' * len(names)}"
    for row in rows:
        values = (row.get(f"{name}, ms", row.get(name)) for name in names)
        yield f"| {row['model']}, {row['GB/s']:g} GB/s | {' | '.join(f'{value:.1f}' for value in values)} |"


def expert_parallel_ranks(rows: Rows) -> Iterator[str]:
    """A line for each way of each preset of `benchmarks.moe_step`."""
    yield from (
        "| | ms | memory held, GiB | expected rows over the average | products by |",
        "| --- | --- | --- | --- | --- |",
    )
    for preset in dict.fromkeys(row["preset"] for row in rows):
        yield f"| **{preset}** | | | | |"
        for row in rows:
            if row["preset"] == preset:
                expected = f"{row['expected']:.2f}" if "expected" in row else ""
                times = f"{row['ms']:.1f} | {row['held_gib']:.1f}"
                yield f"| {_cell(row['way'])} | {times} | {expected} | {_multiplied_by(row)} |"


def plans(rows: Rows) -> Iterator[str]:
    """A line for each step of `benchmarks.plan`: what was measured, and what a plan predicted."""
    yield from (
        "| | ms | predicted | ms, each step waits | peak, GiB | predicted | budget |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    )
    for case in dict.fromkeys(row["case"] for row in rows):
        yield f"| **{_cell(case)}** | | | | | | |"
        yield from (_plan_line(row) for row in rows if row["case"] == case)


SIMULATED = {
    "time, fitted": "Steps that the two constants were fitted to",
    "time, earlier": "Steps compared while the rules were written",
    "time, seen": "Steps held out, and predicted by a reader of the project",
    "time, held out": "Steps written down here before anybody predicted them",
    "time, offload": "What offload adds to a step",
    "time, overlap": "What overlap saves of a step",
    "time, recompute": "What recompute adds to a step",
    "allocated": "Allocated peaks of frameworks",
    "offloaded": "What offload saves of a peak",
    "saved": "What recompute and overlap save of a peak, or add to it",
    "report": "What holds a peak",
}
"""Groups of rows of `benchmarks.simulate`."""


def simulated(rows: Rows) -> Iterator[str]:
    """A line for each published figure of `benchmarks.simulate`; what misses its bar is bold, with a cause."""
    yield from ("| | published | error |", "| --- | ---: | --- |")
    for group, title in SIMULATED.items():
        yield f"| **{title}** | | |"
        for row in (row for row in rows if row["group"] == group):
            what = row["what"].rpartition(" (")[0] or row["what"]  # the file has the source
            error = f"{100 * row['error']:+.0f} %"
            if row["holds"] is False:
                error = f"**{error}**: {row['cause']}"
            told = f"{row['published']:,.0f}" if row["published"] >= 1000 else f"{row['published']:.4g}"
            yield f"| {_cell(what)} | {told} {row['unit']} | {error} |"


def host_time(rows: Rows) -> Iterator[str]:
    """A line for each way of `benchmarks.hooks`, and one for each whole step."""
    yield from (
        "| µs | save a tensor | ask for it | open a region | close it |",
        "| --- | --- | --- | --- | --- |",
    )
    for row in rows:
        if "way" in row:
            cells = [f"{max(row[name], 0.0):.1f}" for name in ("pack", "unpack", "enter", "leave")]
            yield f"| {_cell(row['way'])} | {' | '.join(cells)} |"
    yield from ("", "| whole steps | over the step without a keeper |", "| --- | --- |")
    yield from (f"| {_cell(row['step'])} | {row['ratio']:.3f} |" for row in rows if "step" in row)


ROWS: dict[str, Callable[[Rows], Iterator[str]]] = {
    "hf_step": hugging_face,
    "hf_lora": hugging_face,
    "hooks": host_time,
    "megatron": in_megatron,
    "overlap": pairs,
    "moe_step": expert_parallel_ranks,
    "plan": plans,
    "rivals": lengths,
    "simulate": simulated,
}
"""Benchmarks whose rows a reader wants to see, beside their claims."""


def _plan_line(row: dict[str, Any]) -> str:
    def above(key: str) -> str:
        return f"{(row[key] - row['held_bytes']) / GIB:.2f}" if key in row else ""

    def ms(key: str) -> str:
        return f"{1000 * row[key]:.1f}" if key in row else ""

    name = row["way"]
    if "part" in row:
        name = name.replace("plan", f"plan for {row['part']:g}", 1)
    times = [ms("seconds"), ms("predicted_seconds"), ms("alone_seconds")]
    rounds = [1000 * each for each in row.get("round_seconds", ())]
    if rounds and max(rounds) > 1.02 * min(rounds):
        times[0] += f" (rounds {min(rounds):.1f} to {max(rounds):.1f})"
    if "predicted_alone_seconds" in row:
        times[2] += f" (predicted {ms('predicted_alone_seconds')})"
    cells = [*times, above("peak_bytes"), above("predicted_peak_bytes")]
    if "refused" in row:
        cells = ["nothing fits", "", "", "", ""]
    return f"| {_cell(name)} | {' | '.join(cells)} | {above('budget_bytes')} |"


def replaced(text: str, table: str) -> str:
    """`text` with `table` between the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the text has no {BEGIN} … {END}: add the two markers where the table should stand")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def update(text: Path, table: str, *, check: bool = False) -> bool:
    """Write a table into a text, or with `check` only compare; whether it was stale."""
    old = text.read_text()
    new = replaced(old, table)
    if new != old and not check:
        text.write_text(new)
    return new != old


def _multiplied_by(row: dict[str, Any]) -> str:
    """Who multiplied, without the reason; files of earlier runs do not say."""
    return str(row.get("products", "–")).partition(" ")[0]


def _seen(claim: dict[str, Any]) -> str:
    unit = f" {claim['unit']}" if claim["unit"] else ""
    # A bar that was missed stands in the table like the others.
    return f"{claim['value']:.4g}{unit}{'' if claim['holds'] else ' (missed)'}"


def _packages(benchmark: str) -> tuple[str, ...]:
    """The packages whose versions matter."""
    if benchmark.startswith("jax"):
        return ("jax",)
    return ("torch", "transformers") if benchmark.startswith("hf") else ("torch",)


def _machine(environment: dict[str, Any], *packages: str) -> str:
    """The machine's name without its driver, the versions of what it ran, and the commit."""
    name, versions = environment["machine"].partition(",")[0], environment["versions"]
    ran = [f"{each} {versions[each].partition('+')[0]}" for each in packages if versions.get(each)]
    return _cell(", ".join([name, *ran, environment["commit"][:7]]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
