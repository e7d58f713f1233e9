"""`pagestash partition`: which layers are on which stage, as a table."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagestash.commands.checks import check_file, exit_code
from pagestash.commands.options import PartitionOptions
from pagestash.commands.show import columns
from pagestash.models.config import preset
from pagestash.models.costs import layer_costs
from pagestash.pipeline.costs import LayerCost, measured_costs, read_costs
from pagestash.pipeline.stages import Partition, partition
from pagestash.sizes import format_bytes, parse_bytes

MOST_ACTIONS = 1_000_000
"""Most microbatches × stages: the plans of all ranks are held in memory, action by action."""


def costs_of_preset(options: PartitionOptions) -> list[LayerCost]:
    """The costs of a preset's layers, by formulas."""
    numbers = {
        "microbatch": options.microbatch,
        "seq": options.seq,
        "shards": options.shards,
        "ep": options.ep,
    }
    for what, value in numbers.items():
        if not 1 <= value < 2**31:
            raise ValueError(f"--{what} {value}: expected at least 1, and less than 2^31")
    return layer_costs(
        preset(options.preset, options.layers),
        tokens=options.microbatch * options.seq,
        sequence=options.seq,
        shards=options.shards,
        expert_parallel=options.ep,
    )


def costs_of_file(path: Path, formulas: Sequence[LayerCost]) -> list[LayerCost]:
    """Measured costs from a JSON file: a table of layers, or a profile of the same model."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict) and "regions" in found:
            return measured_costs(found, formulas)
        return read_costs(found)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected what `pagestash profile --json` wrote ({error!r})") from error
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def run(options: PartitionOptions) -> int:
    """Place the layers and print the result; returns the exit code."""
    return exit_code(lambda: _run(options))


def _run(options: PartitionOptions) -> None:
    check_file("--json", options.json)
    costs = costs_of_preset(options)
    if options.costs is not None:
        costs = costs_of_file(options.costs, costs)
    room, microbatches, stages = parse_bytes(options.memory, "memory"), options.microbatches, options.stages
    if microbatches is not None and microbatches * max(1, stages) > MOST_ACTIONS:
        raise ValueError(f"microbatches={microbatches}: expected at most {MOST_ACTIONS // max(1, stages)}")
    placed = partition(costs, stages, options.schedule, microbatches=microbatches, memory=room)
    if options.json is not None:
        options.json.write_text(json.dumps(placed.to_json(), indent=2) + "\n", encoding="utf-8")
    _show(placed, Console(width=columns()))


def _show(placed: Partition, console: Console) -> None:
    table = Table(title=f"{placed.schedule}, {placed.microbatches} microbatches")
    table.add_column("rank", justify="right")
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for name in ("parameters", "activations", "peak", "time"):
        table.add_column(name, justify="right")
    for rank, (peak, time) in enumerate(zip(placed.peaks, placed.times)):
        own = placed.of_rank(rank)
        for stage in own:
            first, last = stage is own[0], stage is own[-1]
            table.add_row(
                str(rank) if first else "",
                str(stage.index),
                _span(stage.layers),
                format_bytes(stage.parameters),
                f"{stage.in_flight} × {format_bytes(stage.activations)}",
                format_bytes(peak) if first else "",
                f"{time:.4g}" if first else "",
                end_section=last,
            )
    console.print(table)
    told = "no placement is better" if placed.optimal else "the best that was found"
    console.print(
        f"Largest peak {format_bytes(max(placed.peaks))}, largest time {max(placed.times):.4g}: {told}."
    )


def _span(names: Sequence[str]) -> str:
    """The names, with consecutive numbered layers as a range: `embed, layers.0-5`."""
    words: list[str] = []
    run: list[str] = []

    def close() -> None:
        if run:
            words.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}")
            run.clear()

    for name in names:
        stem, _, number = name.rpartition(".")
        if not (run and number.isdigit() and stem == run[-1].rpartition(".")[0]):
            close()
        run.append(name)
    close()
    return ", ".join(words)
