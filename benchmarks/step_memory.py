"""The picture of docs/index.md: bytes that a training step holds, allocation by allocation, whole and stashed.

The layers are those of `graphed_stack`, smaller, on a CPU: torch's profiler sees every allocation there, and the
Triton kernels run interpreted. Their time means nothing, so the picture counts allocations, not seconds.
"""

import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.harness import Claim, write

PICTURE = Path(__file__).parent.parent / "docs" / "step-memory.svg"
LAYERS, CAPACITY, WIDTH = 12, 1024, 256
QUICK = 3, 64, 64
AVERAGE = 4  # capacity over the average number of valid rows
MIB = 1 << 20


def measure(layers: int, capacity: int, width: int, home: Any) -> dict[str, Any]:
    """One step after the pool was sized: bytes above the weights after each allocation or free."""
    import torch

    import pagestash as ps
    from benchmarks.graphed_stack import Stack

    torch.manual_seed(0)
    model = Stack(layers, width)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*", home, min_bytes=0)]), backend="triton").attach(model)
    generator = torch.Generator().manual_seed(1)
    rows = (capacity / AVERAGE * (0.6 + 0.8 * torch.rand(layers, generator=generator))).to(torch.int64)
    x = torch.randn(capacity, width, generator=generator)
    with keeper.step():
        model(x, rows).backward()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen, keeper.step():
        loss = model(x, rows)
        with torch.profiler.record_function("turn"):
            loss.backward()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    (turn,) = [event.start_ns() for event in events if event.name() == "turn"]
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    pool = 0 if keeper.pool is None else keeper.pool.device_pages * keeper.pool.page_bytes
    held = list(accumulate((size for _, size in memory), initial=pool))
    return {
        "home": home,
        "pool_bytes": pool,
        "peak_bytes": max(held),
        "turn": sum(moment < turn for moment, _ in memory),
        "held_bytes": held,
    }


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure in a process of its own, where kernels are interpreted; write the result, and draw it."""
    shape = QUICK if quick else (LAYERS, CAPACITY, WIDTH)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.step_memory", *map(str, shape)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    kept, stashed = (row["peak_bytes"] for row in rows)
    claim = Claim(
        what=f"peak bytes of a step, {shape[0]} layers, capacity {AVERAGE}x, CPU, with the stash over without",
        value=round(stashed / kept, 4),
        bar=0.5,
        better="at most",
    )
    config = dict(zip(("layers", "capacity", "width"), shape), average=AVERAGE, dtype="float32")
    path = write("step_memory", config=config, rows=rows, claims=[claim], out=out)
    picture = PICTURE if out is None else path.with_suffix(".svg")
    picture.write_text(draw(rows, config))
    return path


# --- the picture ---

WIDE, HIGH, TOP, LEFT = 400, 190, 92, 66
INK, PALE = "#1b2733", "#5a6776"
PANELS = {
    "keep": ("without", "saved buffers wait whole", "#e08a2c"),
    "stash": ("with the stash", "valid rows wait in pages", "#2f7dd1"),
}


def draw(rows: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """An SVG on a ground of its own, to be read on light and dark pages alike."""
    most = max(row["peak_bytes"] for row in rows)
    step = next(size for size in (1 << power for power in range(10, 60)) if most / size <= 5)
    top = -(-most // step) * step
    parts = [_panel(row, LEFT + at * (WIDE + 40), top, step) for at, row in enumerate(rows)]
    title = (
        f"Memory of one training step: {config['layers']} layers, buffers for "
        f"{config['average']} times the rows that come on average"
    )
    width, height = LEFT + 2 * WIDE + 40 + 24, TOP + HIGH + 62
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
        f'<text x="24" y="30" font-size="16" font-weight="600" fill="{INK}">{title}</text>\n'
        f"{''.join(parts)}</svg>\n"
    )


def _panel(row: dict[str, Any], left: int, top: int, step: int) -> str:
    name, meaning, colour = PANELS[row["home"]]
    held, floor = row["held_bytes"], TOP + HIGH

    def x(event: float) -> float:
        return round(left + WIDE * event / len(held), 1)

    def y(size: int) -> float:
        return round(floor - HIGH * size / top, 1)

    lines = [
        f'<path d="M{left} {y(size)}h{WIDE}" stroke="#e4e8ee"/>'
        f'<text x="{left - 8}" y="{y(size) + 4}" text-anchor="end" fill="{PALE}">{size / MIB:g}</text>'
        for size in range(0, top + 1, step)
    ]
    lines.append(f'<text x="{left - 8}" y="{TOP - 12}" text-anchor="end" fill="{PALE}">MiB</text>')
    outline = "".join(f"V{y(size)}H{x(event + 1)}" for event, size in enumerate(held))
    lines.append(f'<path d="M{left} {floor}{outline}V{floor}z" fill="{colour}" fill-opacity="0.6"/>')
    turn, peak = x(row["turn"]), row["peak_bytes"]
    if row["pool_bytes"]:
        above = y(row["pool_bytes"])
        lines.append(
            f'<rect x="{left}" y="{above}" width="{WIDE}" height="{round(floor - above, 1)}" fill="{colour}"/>'
            f'<text x="{left + WIDE - 12}" y="{round((floor + above) / 2 + 5, 1)}" text-anchor="end" '
            'fill="#ffffff">the pool: what waits for backward</text>'
            f'<text x="{left + WIDE - 12}" y="{y(peak) - 8}" text-anchor="end" fill="{INK}">'
            "above it: buffers of the layer at work</text>"
        )
    lines.append(
        f'<path d="M{turn} {TOP}V{floor}" stroke="{INK}" stroke-dasharray="4 3"/>'
        f'<text x="{left}" y="{TOP - 30}" font-weight="600" fill="{INK}">{name}: '
        f"{peak / MIB:.0f} MiB at the peak</text>"
        f'<text x="{left}" y="{TOP - 12}" fill="{PALE}">{meaning}</text>'
        f'<text x="{(left + turn) / 2}" y="{floor + 22}" text-anchor="middle" fill="{INK}">forward</text>'
        f'<text x="{(turn + left + WIDE) / 2}" y="{floor + 22}" text-anchor="middle" fill="{INK}">backward</text>'
        f'<text x="{left + WIDE}" y="{floor + 44}" text-anchor="end" fill="{PALE}">allocations, in order</text>'
    )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(json.dumps([measure(*map(int, sys.argv[1:]), home) for home in ("keep", "stash")]))
