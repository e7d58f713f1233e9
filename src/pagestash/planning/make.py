"""`plan`: measure a step, and choose the fastest policy that is predicted to fit a budget."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pagestash.planning.alternatives import alternatives
from pagestash.planning.budget import base_bytes, missing, optimizer_state, parse_budget, parse_host
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.pool import OVERFLOW
from pagestash.planning.predict import Prediction, Predictor, RuleTable
from pagestash.planning.result import NothingFits, Plan, policy_of, rows_of
from pagestash.planning.skew import Rows, Skew, row_distribution
from pagestash.planning.solve import Candidate, Problem, candidates
from pagestash.policy import Policy, PoolConfig, format_bytes
from pagestash.profiling.link import Link
from pagestash.profiling.measure import Loss, Progress, profile
from pagestash.profiling.profiled import ProfiledStep


def plan(
    model: nn.Module,
    batch: torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    *,
    budget: str | float,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    host: str | int = "auto",
    rows: Rows | None = None,
    overflow: float = OVERFLOW,
    link: float | Link | None = None,
    autocast: torch.dtype | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Plan:
    """The fastest policy whose step is predicted to fit `budget` bytes of device memory.

        plan = ps.plan(model, batch, budget="40GiB", optimizer=optimizer)
        print(plan)
        keeper = ps.Keeper(plan.policy).attach(model)

    `budget` is for all that the device holds at the step's peak, weights included: `"40GiB"`, bytes, `"auto"` (what
    this process can have of its GPU), or a float: that part of the saved bytes at the unplanned peak. `host` is the
    pinned memory that offload may take. The state of `optimizer` counts, also before its first step. The step is
    measured with `ps.profile`, which takes `loss`, `link`, `autocast`, `repeats` and `progress`.

    `rows` says how the rows vary that a stash holds: a `RowDistribution`, a path of Megatron's tokens per expert,
    the max/mean of a log-normal, or `"measured"`. The pool is then sized so that a step overflows it with a
    probability of at most `overflow`; without `rows`, by what was measured.

    Raises `NothingFits` (a ValueError) if no policy does.
    """
    if rows is not None and rows != "measured":
        rows = row_distribution(rows)  # refuses what is wrong with it before anything is measured
    found = profile(model, batch, loss=loss, link=link, autocast=autocast, repeats=repeats, progress=progress)
    state = 0 if optimizer is None else optimizer_state(optimizer)
    return plan_profile(found, budget=budget, host=host, optimizer_bytes=state, rows=rows, overflow=overflow)


def plan_profile(
    profile: ProfiledStep,
    *,
    budget: str | float,
    host: str | int = "auto",
    optimizer_bytes: int = 0,
    rows: Rows | None = None,
    overflow: float = OVERFLOW,
) -> Plan:
    """The plan for a step that was measured before, perhaps on another machine. Nothing runs."""
    step = MeasuredStep(profile, base_bytes(profile, optimizer_bytes))
    if rows is not None:
        step.skew = Skew.of(rows, step.rows, overflow)
    unplanned = Predictor(step).predict(RuleTable({}, PoolConfig()))
    limit = parse_budget(budget, unplanned, profile.device)
    host_bytes = parse_host(host)
    notes = missing(profile)
    beside = alternatives(step, host_bytes)
    if unplanned.peak_bytes <= limit:
        return Plan(
            policy=Policy(),
            predicted=unplanned,
            unplanned=unplanned,
            budget_bytes=limit,
            turn=step.turn,
            notes=notes,
            alternatives=beside,
        )
    problem = Problem(step, host_bytes)
    found = candidates(problem)
    fitting = [item for item in found if item.predicted.peak_bytes <= limit]
    if not fitting:
        smallest = min((item.predicted for item in found), key=lambda item: item.peak_bytes)
        region = profile.segments[smallest.peak_at].region or "the model itself"
        raise NothingFits(limit, smallest, region, without_host=not host_bytes)
    best = fitting[0]
    policy = policy_of(best.rules, profile.regions)
    expected = None
    if step.skew is not None:
        policy, expected = step.skew.apply(policy, best.predicted.pool, step.rows)
        notes += step.skew.notes(best.predicted.pool, step.rows)
    if not problem.exact:
        off = best.predicted.seconds - unplanned.seconds
        notes.append(
            f"without scipy the plan is found greedily; it is at most {1e3 * off:.2f} ms slower than the best "
            "(pip install 'pagestash[plan]')"
        )
    measured = sum(segment.seconds for segment in profile.segments)
    return Plan(
        policy=policy,
        predicted=best.predicted,
        unplanned=unplanned,
        budget_bytes=limit,
        turn=step.turn,
        rows=rows_of(policy, profile, sum(step.seconds) / measured if measured else 1.0),
        limit=_limit(best.predicted, found, limit),
        notes=notes,
        curve=_curve(found),
        alternatives=beside,
        expected_rows=expected,
    )


def _limit(best: Prediction, found: list[Candidate], budget: int) -> str:
    """What keeps the plan from being faster."""
    faster = [item.predicted for item in found if item.predicted.seconds < best.seconds]
    if not faster:
        return "none: no plan was found to be faster"
    nearest = min(faster, key=lambda item: item.peak_bytes)
    what = "the link" if best.wait_seconds > best.recompute_seconds else "memory"
    more = format_bytes(nearest.peak_bytes - budget)
    return f"{what}: with {more} more, {1e3 * (best.seconds - nearest.seconds):.2f} ms less"


def _curve(found: list[Candidate]) -> list[tuple[int, float]]:
    """Peaks and seconds, from the fastest to the smallest."""
    curve: list[tuple[int, float]] = []
    for item in found:
        if not curve or item.predicted.peak_bytes < curve[-1][0]:
            curve.append((item.predicted.peak_bytes, item.predicted.seconds))
    return curve
