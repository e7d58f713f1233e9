"""`pagestash plan`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from pagestash.commands.profile import WRONG_INPUT, Asked, measure
from pagestash.device import out_of_memory
from pagestash.planning.make import plan_profile
from pagestash.planning.result import Plan
from pagestash.profiling.result import Profile

OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
"""State tensors of each parameter, of its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAsked:
    """The options of the command line."""

    budget: str
    step: Asked
    profile: Path | None = None
    optimizer: str = "none"
    host: str = "auto"
    out: Path | None = None


def run(asked: PlanAsked) -> int:
    """Plan and print; returns the exit code. Bad input, and a budget that nothing fits, are one line on stderr."""
    try:
        found = _plan(asked)
        print(found)
        if asked.out is not None:
            found.policy.save(asked.out)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_INPUT
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print(
            "error: too little memory to measure this step; try --layers, --batch or --seq", file=sys.stderr
        )
        return WRONG_INPUT
    return 0


def _plan(asked: PlanAsked) -> Plan:
    if asked.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {asked.optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    if asked.out is not None and (asked.out.is_dir() or not asked.out.absolute().parent.is_dir()):
        raise ValueError(f"--out {asked.out}: expected a file in a folder that exists")
    profile = _profile(asked)
    state = OPTIMIZERS[asked.optimizer] * (profile.gradient_bytes or 0)
    budget = int(asked.budget) if asked.budget.isdecimal() else asked.budget
    return plan_profile(profile, budget=budget, host=asked.host, optimizer_bytes=state)


def _profile(asked: PlanAsked) -> Profile:
    if asked.profile is None:
        return measure(asked.step)
    if asked.step.preset is not None or asked.step.module is not None:
        raise ValueError("--profile has the measured step: pass no --preset or --module beside it")
    return Profile.load(asked.profile)
