"""A plan is checked by steps under it: a prediction may be wrong, and a budget must not be.

If the peak of such a step exceeds the budget, of which a little is left free, the next plan is for less: by what
the step took above its prediction; or, if the device has no memory for it, by a twentieth, then two, then three.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from pagestash.pages.host import MakeSlab, host_slab
from pagestash.planning.result import NothingFits, Plan
from pagestash.policy import Policy
from pagestash.profiling.memory import MemoryMeter
from pagestash.profiling.progress import Tell, tell_nobody
from pagestash.profiling.steps import RepeatedStep
from pagestash.saved.keeper import Keeper
from pagestash.sizes import format_bytes

RESERVE = 1024
"""One part in so many of the budget is left free: the same steps may hold a little more in another loop. A block
of the CUDA allocator may be up to 1 MiB larger than the tensor in it, and which block a tensor gets depends on what
ran before. Loops held up to 8 MiB of 22 GiB more than those that are measured here, and up to 12 MiB of 80 GiB."""
TRIES = 3
"""Plans that are tried after the first."""
WARM = 2
"""The first step of a keeper is measured, and the second is the first that goes by its plan."""
TIMED = 5
"""Steps that are timed one by one, where each waits."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A steady step under a policy."""

    peak_bytes: int
    seconds: float | None = None
    """The mean of a loop, or the median of steps that wait. None if they were not timed, and on a CPU: copies take
    compute's own time there."""

    @classmethod
    def largest(cls, found: Sequence["Measured"]) -> "Measured":
        """Of several ranks, which wait for each other."""
        times = [each.seconds for each in found if each.seconds is not None]
        return cls(max(each.peak_bytes for each in found), max(times, default=None))


Measure = Callable[[Policy], Measured]
"""Runs steps under a policy; the peak has what the device holds before them."""


def checked(plan: Plan, measure: Measure, plan_for: Callable[[int], Plan], tell: Tell = tell_nobody) -> Plan:
    """The first of some plans whose measured peak is within the budget of `plan`; else the one that is nearest.

    Each further plan is for the budget, less its reserve and what the last one took more than predicted: twice that
    from the second on.
    """
    limit = aim = plan.budget_bytes
    most = limit - limit // RESERVE
    if plan.predicted.peak_bytes > most:
        with suppress(NothingFits):
            plan, aim = plan_for(most), most
    tried: list[Plan] = []
    for number in range(TRIES + 1):
        tell("running steps under plans", number, TRIES + 1)
        found = None
        with suppress(torch.OutOfMemoryError):
            found = measure(plan.policy)
        peak = None if found is None else found.peak_bytes
        plan = replace(
            plan,
            budget_bytes=limit,
            measured_bytes=peak,
            measured_seconds=None if found is None else found.seconds,
            planned_for=aim,
        )
        if peak is not None and peak <= most:
            return plan
        tried.append(plan)
        if peak is None:
            aim -= (number + 1) * limit // 20
        else:
            aim = min(aim, most - min(2, number + 1) * max(0, peak - plan.predicted.peak_bytes))
        try:
            while (plan := plan_for(aim)).policy in [other.policy for other in tried]:
                aim = plan.predicted.peak_bytes - 1
        except NothingFits:
            break
    ran = [(one.measured_bytes, number) for number, one in enumerate(tried) if one.measured_bytes is not None]
    if not ran:
        raise torch.OutOfMemoryError(
            f"out of device memory in a step under a plan for {format_bytes(limit)}, and under {len(tried) - 1} "
            "further plans for less; give a smaller budget, or free what else holds memory on the device"
        )
    return tried[min(ran)[1]]


def measure_under(
    step: RepeatedStep,
    policy: Policy,
    regions: Sequence[str] = (),
    *,
    timed: bool = True,
    waits: bool = False,
    make_slab: MakeSlab = host_slab,
) -> Measured:
    """Steady steps under a policy, inside `step.gradients()`; the peak is above what is there before them.

    `regions` are those of the step that are no modules. Buffers and random state are restored. Steps are timed in a
    loop, whose peak counts, too: a host that is ahead of the device does not see that copies are over. `waits`: it
    waits for each of them. With `timed=False` only the peak of one that waits is measured. `make_slab` makes the
    keeper's host memory.
    """
    for parameter in () if step.held else step.model.parameters():
        parameter.grad = None  # of a measurement before
    gc.collect()  # what waits for it would count as there before
    seconds = None
    meter = MemoryMeter(step.device)
    cuda = step.device.type == "cuda"
    before = meter.mark().now + step.buffer_bytes  # a run has copies of buffers beside them
    keeper = Keeper(policy, quiet=True, make_slab=make_slab).attach(step.model, regions)
    try:
        for number in range(WARM + 1):
            steady = number == WARM
            # (On a CPU operations are counted, and host memory is no other: there it is in place by now.)
            with meter if steady or cuda else nullcontext():
                meter.mark()
                alone = step.run_in(keeper.step())
                peak = meter.mark().peak
        if cuda and timed and waits:
            seconds = statistics.median(step.run_in(keeper.step()) for _ in range(TIMED))
        elif cuda and timed:
            seconds = step.time_loop(keeper.step, alone)
            peak = max(peak, meter.mark().peak)
        pool = keeper.stats().pool
    finally:
        keeper.detach()
    pages = 0 if pool is None or cuda else pool.device.pages
    return Measured(peak - before + pages * policy.pool.page_bytes, seconds)
