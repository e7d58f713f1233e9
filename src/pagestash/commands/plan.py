"""`pagestash plan`."""

from dataclasses import dataclass, field
from pathlib import Path

from pagestash.commands.step import StepOptions, check_file, check_picture, exit_code, measure
from pagestash.planning.make import plan_profile
from pagestash.planning.pool import OVERFLOW
from pagestash.planning.result import Plan
from pagestash.planning.skew import Rows, row_distribution
from pagestash.planning.tokens_per_expert import read_tokens_per_expert
from pagestash.profiling.result import Profile

OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
"""State tensors of each parameter, of its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of the command line."""

    budget: str
    step: StepOptions = field(default_factory=StepOptions)
    profile: Path | None = None
    optimizer: str = "none"
    host: str = "auto"
    rows: str | None = None
    expert: int = 1
    skew: float | None = None
    overflow: float = OVERFLOW
    out: Path | None = None
    curve: Path | None = None
    plot: Path | None = None


def run(options: PlanOptions) -> int:
    """Plan and print; returns the exit code. A budget that nothing fits is bad input."""
    return exit_code(lambda: _run(options))


def _run(options: PlanOptions) -> None:
    found = _plan(options)
    print(found)
    if options.out is not None:
        found.policy.save(options.out)
    if options.curve is not None:
        found.plot_curve(options.curve)
    if options.plot is not None:
        found.plot_memory(options.plot)


def _plan(options: PlanOptions) -> Plan:
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {options.optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    check_file("--out", options.out)
    check_picture("--curve", options.curve)
    check_picture("--plot", options.plot)
    rows = _rows(options)
    profile = _profile(options)
    state = OPTIMIZERS[options.optimizer] * (profile.gradient_bytes or 0)
    budget = int(options.budget) if options.budget.isdecimal() else options.budget
    return plan_profile(
        profile,
        budget=budget,
        host=options.host,
        optimizer_bytes=state,
        rows=rows,
        overflow=options.overflow,
    )


def _rows(options: PlanOptions) -> Rows | None:
    if options.rows is not None and options.skew is not None:
        raise ValueError("--rows and --skew both say how rows vary: expected one of them")
    if options.rows not in (None, "measured"):
        return read_tokens_per_expert(options.rows, ep=options.expert)
    if options.expert != 1:
        raise ValueError(
            f"--expert {options.expert}: it divides the experts of a --rows file, and there is none"
        )
    return options.rows if options.skew is None else row_distribution(options.skew)


def _profile(options: PlanOptions) -> Profile:
    if options.profile is None:
        return measure(options.step)
    if options.step.preset is not None or options.step.module is not None:
        raise ValueError("--profile has the measured step: pass no --preset or --module beside it")
    return Profile.load(options.profile)
