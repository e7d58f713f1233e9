"""Of a plan and its rival, the one whose steps take less.

A plan goes by what a keeper costs the host, which is measured on small regions. It may give up too much for it: the
host may have time to spare where a prediction says that it has none. So a plan that is made as if a keeper cost the
host nothing is tried, too, and taken if its steps are faster.

Faster is what takes less on average, if host and link are slow at times (`lanes.py`). How long the host takes to
launch a plan's steps is measured, and tells what it takes when it is slow. Both plans run in two rounds, in turn,
of which the faster one counts: a slow moment of the host is no property of a plan.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from pagestash.planning.checked import Steps
from pagestash.planning.lanes import SLOW_STEPS
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.result import NothingFits, Plan
from pagestash.profiling.overhead import Overhead

CLOSE = 0.01
"""Times that differ by this part are the same: a step of a GPU takes now a little more, now a little less."""


def faster(
    plan: Plan, step: MeasuredStep, plan_on: Callable[[MeasuredStep], Plan], steps: Steps | None
) -> Plan:
    """The plan, or the one that `plan_on` makes for a host to which a keeper costs nothing."""
    if steps is None or plan.measured_seconds is None or not any(step.lanes.host):
        return plan
    try:
        rival = plan_on(step.with_overhead(Overhead()))
        if rival.policy == plan.policy:
            return plan
        for one in (plan, rival):
            steps.again(one.policy)
    except (NothingFits, torch.OutOfMemoryError):
        return plan
    plan, rival = (_measured(one, steps) for one in (plan, rival))
    (above, seconds), (is_above, takes) = (_rank(one, step, steps) for one in (plan, rival))
    is_faster = above == is_above and takes < (1 - CLOSE) * seconds
    return rival if is_faster or is_above < above else plan


def _measured(plan: Plan, steps: Steps) -> Plan:
    found = steps(plan.policy)
    return replace(plan, measured_bytes=found.peak_bytes, measured_seconds=found.seconds)


def _rank(plan: Plan, step: MeasuredStep, steps: Steps) -> tuple[bool, float]:
    """Whether its steps exceed the budget, and what they take on average over quick and slow hosts."""
    found = steps(plan.policy)
    seconds = found.seconds or 0.0
    slow = step.lanes.slower * (found.launch_seconds or 0.0)
    return found.peak_bytes > plan.budget_bytes, seconds + SLOW_STEPS * max(0.0, slow - seconds)
