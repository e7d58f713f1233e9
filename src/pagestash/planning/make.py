"""`plan`: measure a step, and choose the fastest policy that is predicted to fit a budget."""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pagestash.garbage import collector_paused, old_objects_aside
from pagestash.pages.host import SpareSlab
from pagestash.planning.alternatives import alternatives
from pagestash.planning.budget import (
    base_bytes,
    check_budget,
    check_step,
    device_budget,
    notes_on,
    optimizer_state,
    parse_budget,
    parse_host,
    rank_bytes,
)
from pagestash.planning.checked import Measure, Measured, checked, measure_under
from pagestash.planning.choose import choose, find_candidates, predictor_of
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.measure import Measuring, measured_step
from pagestash.planning.predict import Predictor, predict
from pagestash.planning.prediction import RuleTable
from pagestash.planning.rank import RankStep
from pagestash.planning.ranks import Alone, Ranks
from pagestash.planning.result import Plan
from pagestash.planning.skew import Rows, Skew, row_distribution
from pagestash.planning.stage import ResultBytes, rank_plan, received, stage_step
from pagestash.policy import OVERFLOW, Policy, PoolConfig
from pagestash.profiling.link import Link
from pagestash.profiling.measure import Loss, default_loss, repeated_step
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.progress import Progress, Tell, tell_nobody, telling
from pagestash.profiling.records import Gradients
from pagestash.profiling.result import Profile
from pagestash.profiling.steps import RepeatedStep
from pagestash.saved.module_hooks import refuse_attached
from pagestash.saved.names import named_modules

GRAPH_BYTES = 64 << 20
"""A graph runs on a stream of its own, for which cuBLAS takes workspace once more."""


def plan(
    model: nn.Module,
    batch: torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    *,
    budget: str | float = "auto",
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    host: str | int = "auto",
    rows: Rows | None = None,
    overflow: float = OVERFLOW,
    link: float | Link | None = None,
    autocast: torch.dtype | None = None,
    repeats: int = 3,
    gradients: Gradients = "held",
    progress: Progress = None,
    schedule: Any = None,
    stage: int | None = None,
    profile: Profile | None = None,
    measure: Measuring = "auto",
    graphed: bool = False,
    waits: bool = False,
) -> Plan:
    """The fastest policy whose step is predicted to fit `budget` bytes of device memory.

        plan = ps.plan(model, batch, budget="40GiB", optimizer=optimizer)
        print(plan)
        keeper = ps.Keeper(plan.policy).attach(model)

    `budget` is for all that the device holds at the step's peak, weights included: `"40GiB"`, bytes, `"auto"` (what
    this process can have of its GPU), or a float: that part of the saved bytes at the unplanned peak. `host` is the
    pinned memory that offload may take. The state of `optimizer` counts, also before its first step, and so do the
    gradients: they are there all the time, or with `gradients="fresh"` from where backward computes them. The step
    is measured with `ps.profile`, which takes `loss`, `link`, `autocast`, `repeats`, `gradients` and `progress`.
    With `profile` it was measured before: the same model and batch, with the same arguments.

    A step that finds no memory is measured while its layers are recomputed, one after the other in backward, and
    the step without a policy is predicted; the table says so. `measure="recompute"` begins with that, and `"whole"`
    allows nothing else. It raises `torch.OutOfMemoryError` if a step finds no memory even then.

    With `graphed` the plan is for a step that runs as a CUDA graph (`ps.GraphedStep`). What a keeper costs the host
    does not count there, so more may be recomputed and moved for the same time. The steps that check such a plan
    run eagerly: what a graph is predicted to take more is added to their peak, and they are not timed. On a CPU a
    `GraphedStep` runs eagerly, and the plan is for that.

    Otherwise steps are taken to follow each other: the host launches one while the device runs the one before. With
    `waits` the plan is for a loop that waits for the device before each step, to read the last one's loss, say.
    There the host's time counts more: it is not ahead when forward begins. (In a graph, and for a rank of a
    pipeline, which is planned without a host, `waits` changes nothing.)

    Then steps run under the plan. If their peak exceeds the budget, the plan is made again, for as much less. So a
    plan keeps its budget where a prediction is wrong; if none does, a warning says by how much. On a GPU they are
    timed, too. The table says what was measured.

    With several ranks of `torch.distributed` all must call this. They plan from rank 0's profile, for the largest
    peak of any rank and the smallest budget, and get the same plan. Their layers are recomputed while a step is
    measured, so that no rank runs out of memory while others wait for it in a collective.

    `rows` says how the rows vary that a stash holds: a `RowDistribution`, a path of Megatron's tokens per expert,
    the max/mean of a log-normal, or `"measured"`. The pool is then sized so that a step overflows it with a
    probability of at most `overflow`; without `rows`, by what was measured.

    In a pipeline `model` is one stage, `batch` one microbatch of its input, `schedule` one of
    `torch.distributed.pipelining` (or what `pagestash.pipeline.plans` returns) and `stage` its number. The plan is
    then for all microbatches of a step, in the schedule's order; its keeper has to `follow` the schedule.

    Raises `NothingFits` (a ValueError) if no policy does.
    """
    # What is wrong is refused before anything is measured.
    check_step(loss, optimizer)
    step = None
    if schedule is None:
        step = repeated_step(model, batch, loss=loss, autocast=autocast, gradients=gradients)
    refuse_attached(model)
    check_budget(budget, None if step is None else str(step.device))
    parse_host(host)
    _check_pipeline(graphed, schedule, stage)
    if rows is not None and rows != "measured":
        rows = row_distribution(rows)
    if schedule is not None and stage is None:
        (stage,) = rank_plan(schedule)[0].stages
    result = ResultBytes(loss or default_loss)
    ranks = Ranks() if schedule is None else Alone()
    with telling(progress if ranks.own == 0 else None) as tell:
        found = profile or measured_step(
            model,
            received(batch) if stage else batch,
            ranks,
            measure if schedule is None else "whole",
            next((each.device for each in model.parameters()), torch.device("cpu")),
            loss=loss if schedule is None else result,
            link=link,
            autocast=autocast,
            repeats=repeats,
            gradients=gradients,
            progress=tell,
        )
        # What is allocated already is in `other_bytes`, where that is known.
        there = found.other_bytes is not None
        state = 0 if optimizer is None else optimizer_state(optimizer, to_come=there)
        if ranks.count > 1:
            found, state, budget, host = _agreed(ranks, found, state, budget, host)
        opened = _opened(model, found)
        plan = plan_profile(
            found,
            budget=budget,
            host=host,
            optimizer_bytes=state,
            rows=rows,
            overflow=overflow,
            schedule=schedule,
            stage=stage,
            result_bytes=result.bytes,
            check=step,
            graphed=graphed,
            waits=waits,
            ranks=ranks,
            progress=tell,
        )
    plan = replace(plan, regions=opened)
    if plan.excess_bytes and ranks.own == 0:
        warnings.warn(f"{plan.broken()}", stacklevel=2)
    return plan


def _opened(model: nn.Module, profile: ProfiledStep) -> list[str]:
    """The regions that are no modules: a keeper is told their names."""
    modules = named_modules(model)
    return [region.name for region in profile.regions if region.name and region.name not in modules]


def _agreed(
    ranks: Ranks, found: Profile, state: int, budget: str | float, host: str | int
) -> tuple[Profile, int, str | float, int]:
    """What all ranks plan with: rank 0's profile, the largest peak, the smallest budget and host memory."""

    def peak(profile: Profile, state: int) -> int:
        return predict(profile, Policy(), base_bytes=base_bytes(profile, state)).peak_bytes

    largest = max(ranks.all(peak(found, state)))
    if budget == "auto":
        budget = min(ranks.all(device_budget(found.device)))
    host_bytes = min(ranks.all(parse_host(host)))
    found, state = ranks.first((found, state))
    return found, state + largest - peak(found, state), budget, host_bytes


def plan_profile(
    profile: ProfiledStep,
    *,
    budget: str | float,
    host: str | int = "auto",
    optimizer_bytes: int = 0,
    rows: Rows | None = None,
    overflow: float = OVERFLOW,
    schedule: Any = None,
    stage: int | None = None,
    result_bytes: int | None = None,
    check: RepeatedStep | None = None,
    graphed: bool = False,
    waits: bool = False,
    ranks: Ranks | None = None,
    progress: Progress = None,
) -> Plan:
    """The plan for a step that was measured before, perhaps on another machine.

    Nothing runs, unless there is a step to `check` the plan by. `graphed` and `waits` are those of `plan`. With a
    `schedule`, as for `plan`, the profile is of one microbatch of a stage. `result_bytes` is the size of its
    result; by default that of its input, and in the last stage nothing.
    """
    _check_pipeline(graphed, schedule, stage)
    if schedule is None:
        base = base_bytes(profile, optimizer_bytes)
        step = MeasuredStep(profile, base, graphed=graphed, loops=not waits)
        if step.graphed:
            step.base_bytes += GRAPH_BYTES
        step.skew = None if rows is None else Skew.of(rows, step.rows, overflow)
        with ExitStack() as around:
            measure = _measure(step, check, around, ranks or Alone())
            tell = around.enter_context(telling(progress))
            return plan_step(step, budget=budget, host=host, measure=measure, tell=tell)
    order, _ = rank_plan(schedule, None if stage is None else [stage])
    if len(order.stages) > 1:
        raise ValueError(
            f"the rank has {len(order.stages)} stages: plan_stages of pagestash.planning takes them all"
        )
    return plan_stages(
        {order.stages[0]: profile},
        schedule=schedule,
        budget=budget,
        host=host,
        optimizer_bytes=optimizer_bytes,
        rows=rows,
        overflow=overflow,
        result_bytes=result_bytes,
    )


def _check_pipeline(graphed: bool, schedule: Any, stage: int | None) -> None:
    if stage is not None and schedule is None:
        raise ValueError(f"stage={stage}: pass the schedule of the pipeline, too")
    if graphed and schedule is not None:
        raise ValueError("graphed=True: a pipeline's rank does not run as one CUDA graph; plan it without")


def plan_stages(
    profiles: Mapping[int, ProfiledStep],
    *,
    schedule: Any,
    budget: str | float,
    host: str | int = "auto",
    optimizer_bytes: int = 0,
    rows: Rows | None = None,
    overflow: float = OVERFLOW,
    result_bytes: int | None = None,
) -> Plan:
    """The plan for a pipeline rank with these stages, by number; each was profiled with one microbatch."""
    order, last = rank_plan(schedule, profiles)
    stages = [
        stage_step(own, at, is_last=at == last, result_bytes=result_bytes) for at, own in profiles.items()
    ]
    step = RankStep(stages, order, rank_bytes(profiles.values(), optimizer_bytes))
    step.skew = None if rows is None else Skew.of(rows, step.rows, overflow)
    return plan_step(step, budget=budget, host=host)


def _measure(
    step: MeasuredStep, check: RepeatedStep | None, around: ExitStack, ranks: Ranks
) -> Measure | None:
    """What measures steps under a policy, until `around` ends; None if nothing is to run, or memory cannot be read.

    Of several ranks the largest peak and time count, so that all go on with the same plan.
    """
    if check is None or not step.knows_memory:
        return None
    opened = _opened(check.model, step.profile)
    ready = False
    spare = SpareSlab()

    def measure(policy: Policy) -> Measured:
        nonlocal ready
        if not ready:  # once for all: gradients of a large model are copied aside for seconds
            around.enter_context(check.gradients())
            around.enter_context(old_objects_aside())
            ready = True
        found = ranks.together(
            lambda: measure_under(
                check, policy, opened, timed=not step.graphed, waits=not step.loops, make_slab=spare
            )
        )
        if found is None:
            raise torch.OutOfMemoryError("a step under the policy finds no memory")
        more = _more_in_graph(step, policy) if step.graphed else 0
        own = replace(found, peak_bytes=step.base_bytes + found.peak_bytes + more)
        return Measured.largest(ranks.all(own))

    return measure


def _more_in_graph(step: MeasuredStep, policy: Policy) -> int:
    """How much higher the step's peak is predicted to be in a graph than in an eager step that waits."""
    eager = MeasuredStep(step.profile, step.base_bytes)
    peaks = [
        Predictor(one).predict(RuleTable.of(policy, step.profile.regions)).peak_bytes for one in (step, eager)
    ]
    return max(0, peaks[0] - peaks[1])


def plan_step(
    step: MeasuredStep,
    *,
    budget: str | float,
    host: str | int = "auto",
    measure: Measure | None = None,
    tell: Tell = tell_nobody,
) -> Plan:
    """The plan for a step, or for a pipeline rank's (`RankStep`); `measure` checks it."""
    # Candidates are many small objects without cycles. All but one are gone when the collector runs again.
    with collector_paused() if measure is None else nullcontext():
        return _plan_step(step, budget, host, measure, tell)


def _plan_step(
    step: MeasuredStep, budget: str | float, host: str | int, measure: Measure | None, tell: Tell
) -> Plan:
    profile = step.profile
    predictor = predictor_of(step)
    unplanned = predictor.predict(RuleTable({}, PoolConfig()))
    limit = parse_budget(budget, unplanned, profile.device)
    host_bytes = parse_host(host)
    beside = alternatives(predictor, host_bytes)
    fits = unplanned.peak_bytes <= limit
    if fits:
        best = Plan(
            policy=Policy(),
            predicted=unplanned,
            unplanned=unplanned,
            budget_bytes=limit,
            turn=step.turn,
            notes=notes_on(profile, loops=step.loops),
            alternatives=beside,
            graphed=step.graphed,
            waits=step.waits,
            recomputed_layers=profile.recomputed_layers,
        )
        if measure is None or not profile.recomputed_layers:  # else nobody has seen the step without a policy
            return best
    found = find_candidates(step, host_bytes, tell)
    if not fits:
        best = choose(step, unplanned, limit, host_bytes, found)
    if measure is not None:
        best = checked(best, measure, lambda aim: choose(step, unplanned, aim, host_bytes, found), tell)
    return replace(best, alternatives=beside)
