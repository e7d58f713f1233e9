"""The step of a pipeline rank: all microbatches of its stages, in the order of the schedule's actions."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pagestash.planning.candidates import Candidate, Problem, in_order, unbeaten
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.steady import shortened
from pagestash.planning.unrolled import StageStep, Unrolled, joined
from pagestash.policy import PoolConfig
from pagestash.profiling.link import Link
from pagestash.profiling.progress import Tell
from pagestash.profiling.records import SavedTensor
from pagestash.schedules.plan import Plan, immediate_backwards


class RankStep(MeasuredStep):
    """All actions of a rank in one step."""

    def __init__(self, stages: Iterable[StageStep], plan: Plan, base_bytes: int = 0) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.plan = plan
        _check(self.stages, plan)
        unrolled = Unrolled(self.stages, plan.actions, renamed=True, messages=True)
        super().__init__(unrolled.profile(), base_bytes)
        self.waits = self.loops = False  # there is no host in it
        self.positions = unrolled.positions
        self.halves = unrolled.halves
        self.at_once = immediate_backwards(plan)
        self.reads_allocator = (
            False  # a keeper that follows a schedule plans without the headroom it measured
        )
        self.starts = unrolled.starts
        """The first segment of each action."""
        self.turn = next(start for action, start in zip(plan.actions, self.starts) if action.kind != "F")
        self.microbatches = len({action.microbatch for action in plan.actions})
        self.one = MeasuredStep(joined(self.stages.values()), base_bytes)
        """One microbatch through all stages of the rank."""

    @property
    def slow_link(self) -> Link:
        """The measured one: ranks of a pipeline are compared by the time of quick ones."""
        return self.profile.link

    def where(self, at: int) -> str:
        action = next(
            a for a, start in zip(reversed(self.plan.actions), reversed(self.starts)) if start <= at
        )
        region = self.profile.segments[at].region.partition("@")[0] or "the stage itself"
        return f"{region} (action {action})"

    def wide(self, rules: RuleTable) -> RuleTable:
        """Rules by region, for every microbatch."""
        found = {
            renamed: rule
            for renamed in self.positions
            if (rule := rules.rule_for(renamed.rpartition("@")[0]))
        }
        return RuleTable(found, rules.pool)

    def action_seconds(self, predicted: Prediction) -> list[float]:
        """How long each action takes, waits included."""
        times = [*predicted.starts, predicted.seconds]
        ends = [*self.starts[1:], self.count]
        return [times[end] - times[start] for start, end in zip(self.starts, ends)]


class RankPredictor(Predictor):
    """Predicts policies for a rank's step; their rules name regions without a microbatch."""

    step: RankStep

    @property
    def one(self) -> MeasuredStep:
        return self.step.one

    def largest_kept(self, rules: RuleTable, at: int) -> SavedTensor | None:
        found = super().largest_kept(self.step.wide(rules), at)
        return None if found is None else replace(found, region=found.region.partition("@")[0])

    def predict(self, rules: RuleTable) -> Prediction:
        found = super().predict(self.step.wide(rules))
        copies: dict[str, int] = {}
        for name in found.staying:
            name = name.rpartition("@")[0]
            copies[name] = copies.get(name, 0) + 1
        staying = frozenset(name for name, count in copies.items() if count == self.step.microbatches)
        moving = frozenset(name.rpartition("@")[0] for name in found.moving)
        return replace(found, staying=staying, moving=moving)


def rank_candidates(step: RankStep, host_bytes: int, tell: Tell) -> list[Candidate]:
    """Candidates for a rank, the fastest first.

    All are predicted on a step whose steady state is cut short, and on the whole one those that no other beats.
    """
    plan = shortened(step.plan)
    short = step if plan is step.plan else RankStep(step.stages.values(), plan, step.base_bytes)
    short.skew = step.skew
    problem = Problem(short.one, host_bytes, predictor=RankPredictor(short))
    found = problem.candidates(tell)
    if short is step:
        return found
    predictor = RankPredictor(step)
    again = [Candidate(c.rules, predictor.predict(RuleTable(c.rules, PoolConfig()))) for c in unbeaten(found)]
    return in_order([item for item in again if item.predicted.host_bytes <= host_bytes])


def _check(stages: Mapping[int, StageStep], plan: Plan) -> None:
    if set(stages) != set(plan.stages):
        raise ValueError(
            f"the schedule runs stages {list(plan.stages)} on this rank: got profiles of {sorted(stages)}"
        )
    if {a[1:] for a in plan.actions if a.kind == "F"} != {a[1:] for a in plan.actions if a.kind in "BW"}:
        raise ValueError("the schedule has forwards without a backward: nothing is saved for those")
    seen: dict[str, int] = {}
    for index, stage in stages.items():
        for region in stage.profile.regions:
            other = seen.setdefault(region.name, index)
            if region.name and other != index:
                raise ValueError(
                    f"stages {other} and {index} of one rank both have a region {region.name!r}: a policy finds "
                    "regions by name, so number the layers as the whole model does"
                )
