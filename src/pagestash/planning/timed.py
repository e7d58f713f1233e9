"""A plan's time is checked by steps, too: what a keeper costs the host is not the same in every model.

That cost is measured on small regions (`profiling/overhead.py`). If steps under a plan take longer or shorter than
predicted, they are measured a second time, and the faster of both counts: a slow moment of the host is no property
of a plan. If that is not as predicted, all of the cost is scaled by one factor, with which it is. The plan is then
made again, and of those that were tried the fastest is taken.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from pagestash.planning.checked import Steps
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.result import NothingFits, Plan
from pagestash.policy import Policy, PoolConfig

CLOSE = 0.02
"""Times that differ by this part are the same: a step of a GPU takes now a little more, now a little less."""
TRIES = 2
"""Plans that are tried after the first."""
SMALLEST, LARGEST = 0.25, 4.0
"""Of a factor. A step that needs another one is slow for another reason."""


def timed(
    plan: Plan, step: MeasuredStep, plan_on: Callable[[MeasuredStep], Plan], steps: Steps | None
) -> tuple[Plan, MeasuredStep]:
    """The plan whose steps took the least, and the step that was fitted to them.

    `plan` and those of `plan_on` were checked by `steps`. The fitted step is `step` itself where its prediction is
    close, or where no such factor explains the times.
    """
    tried: list[tuple[Plan, float, float]] = []  # the factor that fits a plan, and the one it was made with
    made = 1.0
    while True:
        factor = fit(step, plan)
        if factor != 1.0 and steps is not None:
            with suppress(torch.OutOfMemoryError):
                plan = replace(plan, measured_seconds=steps.again(plan.policy).seconds)
            factor = fit(step, plan)
        tried.append((plan, factor, made))
        if factor == 1.0 or len(tried) > TRIES:
            break
        made = factor
        try:
            plan = plan_on(_scaled(step, factor))
        except (NothingFits, torch.OutOfMemoryError):  # other times of copies, other peaks
            break
        known = next((at for at, (other, _, _) in enumerate(tried) if other.policy == plan.policy), None)
        if known is not None:
            tried[known] = plan, tried[known][1], made
            break
    best, factor, made = min(tried, key=lambda item: _rank(item[0]))
    if factor == 1.0:
        return best if made == 1.0 else replace(best, predicted=_predict(step, best.policy)), step
    fitted = _scaled(step, factor)
    note = f"in these steps a keeper costs the host {factor:.2f} times what it does in small regions"
    return replace(best, predicted=_predict(fitted, best.policy), notes=[*best.notes, note]), fitted


def fit(step: MeasuredStep, plan: Plan) -> float:
    """The factor of a keeper's costs for the host with which the plan takes what was measured.

    1 if the prediction is close without, or if no factor explains the measured time.
    """
    measured = plan.measured_seconds
    if measured is None or not any(step.lanes.host):
        return 1.0

    def takes(factor: float) -> float:
        return _predict(_scaled(step, factor), plan.policy).seconds

    if abs(takes(1.0) - measured) <= CLOSE * measured or not takes(SMALLEST) <= measured <= takes(LARGEST):
        return 1.0
    low, high = SMALLEST, LARGEST
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if takes(middle) < measured else (low, middle)
    return high


def _scaled(step: MeasuredStep, factor: float) -> MeasuredStep:
    return step.with_overhead(step.overhead.scaled(factor))


def _predict(step: MeasuredStep, policy: Policy) -> Prediction:
    rules = RuleTable.of(policy, step.profile.regions).rules
    return Predictor(step).predict(RuleTable(rules, PoolConfig()))


def _rank(plan: Plan) -> tuple[bool, float]:
    """The least is the best: the fastest within the budget, and if none is, the nearest to it."""
    above = plan.measured_bytes is not None and plan.measured_bytes > plan.budget_bytes
    return above, (plan.measured_bytes if above else plan.measured_seconds) or 0.0
