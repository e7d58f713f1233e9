"""`pagestash plan`."""

from dataclasses import dataclass, field
from pathlib import Path

from pagestash.commands.step import StepOptions, check_file, check_picture, exit_code, measure
from pagestash.planning.make import plan_profile
from pagestash.planning.result import Plan
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
    profile = _profile(options)
    state = OPTIMIZERS[options.optimizer] * (profile.gradient_bytes or 0)
    budget = int(options.budget) if options.budget.isdecimal() else options.budget
    return plan_profile(profile, budget=budget, host=options.host, optimizer_bytes=state)


def _profile(options: PlanOptions) -> Profile:
    if options.profile is None:
        return measure(options.step)
    if options.step.preset is not None or options.step.module is not None:
        raise ValueError("--profile has the measured step: pass no --preset or --module beside it")
    return Profile.load(options.profile)
