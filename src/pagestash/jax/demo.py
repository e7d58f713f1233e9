"""Train a small ring-of-experts decoder on four virtual devices, plain and stashed, side by side.

    python -m pagestash.jax.demo [--steps 20] [--factor 1.5] [--nnx]

Both start from the same weights and get the same batches. Their losses must agree up to rounding: XLA chooses
the order of summation in each of the two programs. They differ in the temporary memory that the compiler
allocates.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .moe import (
    STASHED,
    X_SORTED,
    DecoderConfig,
    RingConfig,
    decoder_loss,
    init_decoder,
    plain_scan,
    stashed_scan,
)
from .moe.decoder import Scan, place
from .policy import StashPolicy, StashReport
from .sizing import expected_rows

DEVICES, BATCH, SEQUENCE = 4, 8, 64
CONFIG = DecoderConfig(
    vocabulary=64,
    width=32,
    heads=4,
    layers=12,
    moe=RingConfig(width=32, expert_width=32, experts=16, top_k=4, shards=DEVICES),
)
NAMES = (*STASHED, X_SORTED)
MIB = 2**20
# 12 layers in a row sum some 5,000 float32 terms: 5,000 · 2^-23. Wrong rows would change the second digit.
ROUNDING = 6e-4
# Otherwise compiling takes most of a minute. Both get the same; XLA assigns memory before LLVM runs.
QUICK_COMPILATION = {"xla_backend_optimization_level": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if the losses differ by more than rounding."""
    options = _options(argv)
    console = Console()
    if not _four_devices():
        console.print(
            f"[red]This needs {DEVICES} CPU devices; jax is already running with {jax.device_count()}[/]. "
            "Start it in a fresh process: python -m pagestash.jax.demo"
        )
        return 1
    mesh = jax.make_mesh((DEVICES,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    policy = StashPolicy(
        names=NAMES,
        capacity_factor=options.factor,
        expected_rows=expected_rows(BATCH // DEVICES, DEVICES, SEQUENCE, CONFIG.moe.top_k),
    )
    console.print(
        f"{CONFIG.layers} layers, {CONFIG.moe.experts} experts over {DEVICES} devices; "
        f"{policy.expected_rows:,} rows expected a layer and device, "
        f"{CONFIG.moe.row_capacity(BATCH * SEQUENCE):,} in the worst case"
    )
    params, loss = _nnx_model(mesh) if options.nnx else _plain_model(mesh)
    scans: dict[str, Scan] = {"plain": plain_scan, "stashed": stashed_scan(policy, mesh)}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        compiling = progress.add_task("compiling", total=len(scans))
        batches = _batches(options.steps)
        first = next(_batches(1))
        steps, states = {}, {}
        for name, scan in scans.items():
            states[name] = (params, jax.tree.map(jnp.zeros_like, params))
            steps[name] = _step(loss, scan).lower(*states[name], first).compile(QUICK_COMPILATION)
            progress.advance(compiling)
        training = progress.add_task("training", total=options.steps)
        history, spent, report = [], dict.fromkeys(scans, 0.0), None
        for batch in batches:
            row = {}
            for name, step in steps.items():
                begun = time.perf_counter()
                *states[name], value, told = step(*states[name], batch)
                row[name] = float(value)
                spent[name] += time.perf_counter() - begun
                report = told if told is not None else report
            history.append(row)
            progress.update(training, advance=1, description=f"training, loss {row['plain']:.4f}")

    off = [abs(row["plain"] - row["stashed"]) / abs(row["plain"]) for row in history]
    console.print(_table(steps, history, spent))
    assert report is not None
    console.print(_told(report))
    too_far = [step for step, share in enumerate(off) if not share <= ROUNDING]
    if too_far:
        console.print(f"[red]losses differ, first at step {too_far[0]}[/]: {history[too_far[0]]}")
        return 1
    difference = f"at most {max(off):.0e} apart" if any(off) else "the same number in each"
    console.print(f"losses agree in all {len(history)} steps, {difference}")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pagestash jax-demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=1.5, help="capacity factor (default: %(default)s)")
    parser.add_argument("--nnx", action="store_true", help="the Flax NNX module instead of plain functions")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    if not 0 < options.factor <= 100:
        parser.error(f"--factor {options.factor}: expected more than 0, at most 100")
    return options


def _four_devices() -> bool:
    """Request four CPU devices; possible only before jax has initialised its devices."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    except RuntimeError:
        pass  # jax is running; perhaps it has the devices anyway
    return jax.default_backend() == "cpu" and jax.device_count() == DEVICES


Loss = Callable[[Any, jax.Array, Scan], tuple[jax.Array, StashReport | None]]


def _plain_model(mesh: Any) -> tuple[Any, Loss]:
    params = place(init_decoder(jax.random.key(0), CONFIG), mesh)
    return params, lambda params, tokens, scan: decoder_loss(
        params, tokens, config=CONFIG, mesh=mesh, scan=scan
    )


def _nnx_model(mesh: Any) -> tuple[Any, Loss]:
    from flax import nnx  # only this variant needs flax

    from .moe.nnx import Decoder

    parts: Any = nnx.split(Decoder(CONFIG, mesh, rngs=nnx.Rngs(0)), nnx.Param, ...)
    definition, params, rest = parts
    return place(params, mesh), lambda params, tokens, scan: nnx.merge(definition, params, rest).loss(
        tokens, scan
    )


def _step(loss: Loss, scan: Scan, rate: float = 0.02, momentum: float = 0.9) -> Any:
    """Gradient descent with momentum on a clipped gradient."""

    def step(params: Any, velocity: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array, Any]:
        (value, report), grads = jax.value_and_grad(lambda p: loss(p, tokens, scan), has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 1.0 / norm)
        velocity = jax.tree.map(lambda v, g: momentum * v + scale * g, velocity, grads)
        return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, value, report

    return jax.jit(step)


def _batches(count: int) -> Iterator[jax.Array]:
    """Sequences that step through the vocabulary by a stride, which two tokens reveal."""
    for index in range(count):
        key = jax.random.fold_in(jax.random.key(1), index)
        start = jax.random.randint(key, (BATCH, 1), 0, CONFIG.vocabulary)
        stride = 1 + start % 4
        yield (start + stride * jnp.arange(SEQUENCE + 1)) % CONFIG.vocabulary


def _table(steps: dict[str, Any], history: list[dict[str, float]], spent: dict[str, float]) -> Table:
    table = Table(title="plain against stashed, a device")
    for column in ("", "temporary memory", "of plain", "first loss", "last loss", "ms a step"):
        table.add_column(column, justify="left" if not column else "right")
    temp = {name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()}
    for name in steps:
        table.add_row(
            name,
            f"{temp[name] / MIB:.1f} MiB",
            f"{temp[name] / temp['plain']:.2f}",
            f"{history[0][name]:.6f}",
            f"{history[-1][name]:.6f}",
            f"{1000 * spent[name] / len(history):.0f}",
        )
    return table


def _told(report: StashReport) -> str:
    wanted, used, capacity, recomputed = (
        int(value)
        for value in (report.rows_wanted, report.rows_used, report.rows_capacity, report.layers_recomputed)
    )
    return (
        f"last step: {wanted:,} rows wanted on the hottest device, {used:,} held, room for {capacity:,}; "
        f"{recomputed} of {CONFIG.layers} layers recomputed"
    )


if __name__ == "__main__":
    raise SystemExit(main())
