"""`pagestash train`."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from rich.console import Console

from pagestash.commands.options import TrainOptions
from pagestash.commands.show import note
from pagestash.device import out_of_memory
from pagestash.sizes import format_bytes
from pagestash.train.config import checked, merge, parse_assignments, read_toml
from pagestash.train.folder import RunError
from pagestash.train.loop import train
from pagestash.train.metrics import Display, StepListener, display
from pagestash.train.prepare import RunPlan, prepare

WRONG_INPUT = 2
INTERRUPTED = 130


_NAMES = {"pp": "pipeline", "ep": "expert_parallel"}
"""Settings of a run by options that have another name."""


def run(options: TrainOptions) -> int:
    """Prepare and train; returns the exit code. Bad input is one line on stderr."""
    given = asdict(options)
    config, assignments, resume, out = (
        given.pop(name) for name in ("config", "assignments", "resume", "out")
    )
    given = {_NAMES.get(key, key): value for key, value in given.items() if value is not None}
    if "corpus" in given:
        given["corpus"] = tuple(given["corpus"])
    try:
        sources = [read_toml(config) if config else {}, parse_assignments(assignments or []), checked(given)]
        plan = prepare(_settings(sources), out, resume=resume)
    except ValueError as error:
        return _refuse(str(error))
    try:
        return _train(plan)
    except RunError as error:
        return _refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _refuse(
            f"{plan.device} has too little memory for this run; try smaller batch, sequence or layers"
        )


def _refuse(text: str) -> int:
    if os.environ.get("RANK", "0") == "0":  # every rank finds the error, one prints it
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return WRONG_INPUT


def _train(plan: RunPlan) -> int:
    console = Console()
    if plan.world.leads:
        for notice in plan.notices:
            note(notice)
    with ExitStack() as stack:
        listeners: list[StepListener] = []
        if plan.world.leads:
            _announce(plan, console)
            progress = stack.enter_context(display(console))
            done = int(plan.start.name.removeprefix("step-")) if plan.start else 0
            listeners.append(Display(progress, plan.config.preset, plan.config.steps, done))
        result = train(plan, listeners)
    if plan.world.leads:
        if result.stopped:
            console.print(
                f"Stopped after step {result.step}, with a checkpoint; --resume goes on from there."
            )
        else:
            console.print(f"Done: {result.step} steps, in {plan.out}")
    return INTERRUPTED if result.stopped else 0


def _settings(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that were given; later sources win. Those not given come from the run that is resumed."""
    merged = merge(*sources)
    return {key: getattr(merged, key) for source in sources for key in source}


def _announce(plan: RunPlan, console: Console) -> None:
    config, decoder, world = plan.config, plan.decoder, plan.world
    ranks = f", {world.size} ranks ({world.expert_parallel} share the experts)" if world.size > 1 else ""
    if plan.placed is not None:
        ranks += f", {len(plan.placed.stages)} stages under {plan.placed.schedule}"
    console.print(
        f"{config.preset}: layers {decoder.layers}, experts {decoder.experts}, top-{decoder.top_k}; "
        f"{plan.corpus.files:,} files, {format_bytes(plan.corpus.data.numel())}; on {plan.device}{ranks}"
    )
    if plan.start is not None:
        console.print(f"Going on from {plan.start}")
