"""A plan's time is checked by steps, too: what a keeper costs the host is not the same in every model.

That cost is measured on small regions (`profiling/overhead.py`). If steps under a plan take longer or shorter than
predicted, they are measured a second time, and the faster of both counts: a slow moment of the host is no property
of a plan. If that is not as predicted, all of the cost is scaled by one factor, with which it is, and the plan is
made again. In a loop that the device bounds, the cost makes no difference to the time: there the factor is the one
with which the host takes what it took to launch a step. If it takes nearly as long as the device, it is not always
ahead, because it is now quicker, now slower: then the loop takes longer than both, and the factor is larger.

A device is not always as fast, either: at its power limit it lowers its clock. If a plan's steps do not take what
was predicted, steps without a policy are timed beside them, and predictions are for a device on which they take
that.

A plan that goes by that cost may give up too much for it: the host may have time to spare where a prediction says
that it has none. So one that is made as if a keeper cost the host nothing is tried, too. In a loop, if the first
one takes what was predicted and its launches do not, so is one for the cost that they show. Of all that were tried
the fastest is taken; of those that are as fast, the one that was made for the highest cost.

In a loop the fastest is the one that takes the least on average, if host and link are slow at times (`lanes.py`). A
plan whose steps the host launches just in time may have been timed in a quick moment: on the machine of an H200
such plans took a tenth longer in some rounds, and others did not. How long the host takes to launch a plan's steps
is measured, and tells what it takes when it is slow. Before a faster plan is passed over, its launches are timed
again: they may have been in a slow moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pagestash.planning.checked import Steps
from pagestash.planning.lanes import HOST_BOUND, SLOW_STEPS
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.result import NothingFits, Plan
from pagestash.policy import Policy, PoolConfig

CLOSE = 0.02
"""Times that differ by this part are the same: a step of a GPU takes now a little more, now a little less."""
CLOSE_IN_LOOP = 0.005
"""The same of steps in a loop: in one of them the host makes up for what it lost in another."""
SHOWN = 1.1
"""A plan is made for the cost that launches show, if that differs by this factor from what was measured."""
NEAR = 1.5
"""For a factor up to this, or down to its inverse, searches for others have found a plan about as good as any."""
RIVALS = 0.1
"""A plan that is slower than the fastest by less than this part may be the fastest in another round."""
DRIFT = 1.25
"""A device may be slower or faster by this factor than it was in the profile. More has another reason."""
SMALLEST, LARGEST = 0.25, 4.0
"""Of a factor. A step that needs another one is slow, or quick, for another reason."""


@dataclass(slots=True)
class _Trial:
    """A plan whose steps ran."""

    plan: Plan
    made: float
    """The factor that it was made with."""
    fits: float = 1.0
    """The factor with which it is predicted to take what it took."""
    shown: float = 1.0
    """The factor that its launches show, in a loop whose host is ahead; else the one with which it fits."""
    slow_seconds: float = 0.0
    """What a step of such a loop takes where host and link are slow."""
    failed: bool = False
    """Whether it found no memory in a further round."""

    @property
    def rank(self) -> tuple[bool, float]:
        """The least is the best: the fastest within the budget on average, and if none is, the nearest to it."""
        plan = self.plan
        above = self.failed or (plan.measured_bytes is not None and plan.measured_bytes > plan.budget_bytes)
        if above:
            return above, plan.measured_bytes or 0.0
        return above, self.seconds + SLOW_STEPS * max(0.0, self.slow_seconds - self.seconds)

    @property
    def seconds(self) -> float:
        """What a step took."""
        return self.plan.measured_seconds or 0.0


PlanOn = Callable[[MeasuredStep], Plan]
"""Makes a plan for a step, and checks it."""


def timed(
    plan: Plan, step: MeasuredStep, search_on: PlanOn, choose_on: PlanOn, steps: Steps | None
) -> tuple[Plan, MeasuredStep]:
    """The plan whose steps take the least, and the step that was fitted to them.

    `plan` was found by `search_on`; `choose_on` chooses among what searches have found. All are checked by `steps`.
    The fitted step is `step` itself where its prediction is close, or where nothing explains the times.
    """
    if steps is None or plan.measured_seconds is None or not any(step.lanes.host):
        return plan, step
    trials = _Trials(step, steps)
    first = trials.add(plan, 1.0)
    if not trials.is_close(first):
        trials.run_again(first)
    notes = []
    if not trials.is_close(first) and (drift := trials.time_unplanned()) != 1.0:
        notes.append(
            f"beside these steps one without a policy took {drift:.3f} times what it took in the profile"
        )
        trials.fit_again(first)
    trials.make(0.0, search_on)
    factor = first.fits
    if factor == 1.0 and trials.shows_other_launches(first):
        factor = first.shown
    if factor != 1.0:
        trials.make(factor, choose_on if 1 / NEAR <= factor <= NEAR else search_on)
    best = trials.best()
    if (fastest := trials.fastest()).rank > best.rank:
        notes.append(
            f"a plan whose steps took {1e3 * fastest.seconds:.2f} ms was not taken: on average it takes longer, "
            "with a host or a link that is slow at times"
        )
    fitted = trials.step
    if best.fits != 1.0:
        fitted = _scaled(fitted, best.fits)
        notes.append(
            f"times are predicted as if a keeper cost the host {best.fits:.2f} times what it does in small regions"
        )
    if fitted is step and best.made == 1.0:
        return replace(best.plan, notes=[*best.plan.notes, *notes]), step
    return replace(_predicted_on(fitted, best.plan), notes=[*best.plan.notes, *notes]), fitted


class _Trials:
    """The plans that were tried for one step."""

    def __init__(self, step: MeasuredStep, steps: Steps) -> None:
        self.step = step
        """As it is predicted."""
        self._steps = steps
        self._tried: list[_Trial] = []

    def is_close(self, trial: _Trial) -> bool:
        """Whether the plan's steps took what is predicted of them."""
        return _is_close(_predict(self.step, trial.plan.policy).seconds, trial.plan)

    def time_unplanned(self) -> float:
        """Time steps without a policy, and let `step` take that; by what factor it differs then.

        In two rounds, of which the faster one counts: a slow moment of the host is nothing that lasts.
        """
        try:
            self._steps(Policy())
            found = self._steps.again(Policy()).seconds
        except torch.OutOfMemoryError:
            return 1.0
        factor = (found or 0.0) / _predict(self.step, Policy()).seconds
        if found is None or not 1 / DRIFT <= factor <= DRIFT or abs(factor - 1) <= CLOSE_IN_LOOP:
            return 1.0
        self.step = self.step.taking(found)
        return factor

    def fit_again(self, trial: _Trial) -> None:
        """By the step as it is predicted now."""
        launched = self._steps(trial.plan.policy).launch_seconds
        trial.fits = trial.shown = fit(self.step, trial.plan, launched)
        if self.step.ahead:
            if launched is not None:
                trial.shown = _fit_launches(self.step, trial.plan.policy, launched)
            found = _predict(_scaled(self.step, trial.shown), trial.plan.policy)
            trial.slow_seconds = max(found.slow_host_seconds, found.slower_host * (launched or 0.0))

    def shows_other_launches(self, trial: _Trial) -> bool:
        """Whether the host took another time to launch its steps than is predicted, by enough to plan for."""
        launched = self._steps(trial.plan.policy).launch_seconds
        if launched is None or 1 / SHOWN <= trial.shown <= SHOWN:
            return False
        predicted = _predict(self.step, trial.plan.policy).launch_seconds
        return abs(launched - predicted) > CLOSE * trial.seconds

    def make(self, factor: float, plan_on: PlanOn) -> None:
        """Try a plan for this factor, if there is one that was not tried before."""
        try:
            plan = plan_on(_scaled(self.step, factor))
        except (NothingFits, torch.OutOfMemoryError):  # other times of copies, other peaks
            return
        known = next((trial for trial in self._tried if trial.plan.policy == plan.policy), None)
        if known is None:
            self.add(plan, factor)
        else:
            known.made = max(known.made, factor)

    def add(self, plan: Plan, made: float) -> _Trial:
        trial = _Trial(plan, made)
        self.fit_again(trial)
        self._tried.append(trial)
        return trial

    def run_again(self, trial: _Trial) -> None:
        """Of all its rounds the smallest time counts, and the highest peak."""
        try:
            found = self._steps.again(trial.plan.policy)
        except torch.OutOfMemoryError:
            trial.failed = True
            return
        trial.plan = replace(trial.plan, measured_bytes=found.peak_bytes, measured_seconds=found.seconds)
        self.fit_again(trial)

    def best(self) -> _Trial:
        if len(self._tried) > 1:
            rivals, fastest = self._about_as_fast(RIVALS)[:2], self.fastest()
            is_known = any(trial is fastest for trial in rivals)
            if not is_known and not fastest.rank[0]:  # it may have been launched in a slow moment
                rivals.append(fastest)
            for trial in rivals:  # in turn
                self.run_again(trial)
        close = CLOSE_IN_LOOP if self.step.loops else CLOSE
        return max(self._about_as_fast(close), key=lambda trial: trial.made)

    def fastest(self) -> _Trial:
        """The one whose steps took the least; of those within the budget, if there are any."""
        above = min(trial.rank for trial in self._tried)[0]
        return min(
            (trial for trial in self._tried if trial.rank[0] == above), key=lambda trial: trial.seconds
        )

    def _about_as_fast(self, part: float) -> list[_Trial]:
        """As the best, which is the first: those that are slower by no more than this part."""
        ranked = sorted(self._tried, key=lambda trial: trial.rank)
        above, least = ranked[0].rank
        if above:
            return ranked[:1]
        return [trial for trial in ranked if trial.rank <= (False, (1 + part) * least)]


def fit(step: MeasuredStep, plan: Plan, launched: float | None = None) -> float:
    """The factor of a keeper's costs for the host with which the plan takes what was measured.

    1 if the prediction is close without, or if no factor explains the measured time. Where the host took `launched`
    to launch a step of a loop, that tells the factor, or the nearest one: a loop that the device bounds does not.
    A larger one may explain what a loop takes longer in which the host is not always ahead.
    """
    measured = plan.measured_seconds
    if measured is None or not any(step.lanes.host):
        return 1.0

    def predicted(factor: float) -> Prediction:
        return _predict(_scaled(step, factor), plan.policy)

    def off(factor: float) -> float:
        return abs(predicted(factor).seconds - measured)

    found, low = 1.0, SMALLEST
    if _is_close(predicted(found).seconds, plan):
        return found
    if step.ahead and launched is not None:
        by_launches = _fit_launches(step, plan.policy, launched)
        if off(by_launches) < off(1.0):
            found = by_launches
        low = found
        fitted = predicted(found)
        if _is_close(fitted.seconds, plan) or fitted.launch_seconds <= HOST_BOUND * measured:
            return found
    if not predicted(low).seconds <= measured <= predicted(LARGEST).seconds:
        return found
    high = LARGEST
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(middle).seconds < measured else (low, middle)
    return high


def _is_close(seconds: float, plan: Plan) -> bool:
    """Whether the plan's steps took about that."""
    measured = plan.measured_seconds or 0.0
    return abs(seconds - measured) <= CLOSE * measured


def _fit_launches(step: MeasuredStep, policy: Policy, launched: float) -> float:
    """The factor with which the host takes so long to launch a step, or the nearest one."""
    without, once = (_predict(_scaled(step, factor), policy).launch_seconds for factor in (0.0, 1.0))
    if once <= without:
        return 1.0
    return min(max((launched - without) / (once - without), SMALLEST), LARGEST)


def _scaled(step: MeasuredStep, factor: float) -> MeasuredStep:
    return step.with_overhead(step.overhead.scaled(factor))


def _predict(step: MeasuredStep, policy: Policy) -> Prediction:
    rules = RuleTable.of(policy, step.profile.regions).rules
    return Predictor(step).predict(RuleTable(rules, PoolConfig()))


def _predicted_on(step: MeasuredStep, plan: Plan) -> Plan:
    return replace(plan, predicted=_predict(step, plan.policy))
