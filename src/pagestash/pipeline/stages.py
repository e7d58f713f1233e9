"""`partition`: which layers stand on which stage."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from pagestash.pipeline.costs import LayerCost
from pagestash.pipeline.search import Problem, solve
from pagestash.schedules.plan import Plan, in_flight, plans, schedule_name, stages_a_rank


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous part of the model, and what it costs its rank."""

    index: int
    rank: int
    layers: tuple[str, ...]
    first: int
    """Where its layers begin in the list of costs."""
    parameters: int
    activations: int
    """Bytes of one microbatch."""
    in_flight: int
    """Microbatches that it holds at the most."""
    time: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages in the order of the model, and each rank's peak bytes and time."""

    schedule: str
    microbatches: int
    stages: tuple[Stage, ...]
    peaks: tuple[int, ...]
    """Of each rank: parameters of all its stages, and the most that the microbatches it holds at one time keep."""
    times: tuple[float, ...]
    """Of each rank: both passes of one microbatch through all its stages."""
    optimal: bool
    """Whether no other placement is better; False: the best that was found in the time given."""

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def partition(
    costs: Sequence[LayerCost],
    stages: int,
    schedule: str,
    *,
    microbatches: int | None = None,
    chunks: int | None = None,
    memory: int = 0,
) -> Partition:
    """Place layers on stages so that the largest peak memory of a rank is smallest, then the largest time.

        costs = layer_costs(preset("qwen3-30b-a3b"), tokens=4096)      # of pagestash.models.costs
        placed = partition(costs, 8, "DualPipeV", microbatches=16)
        placed.stages[0].layers                                         # ('embed', 'layers.0', …)

    Every stage gets a layer at least. The number of microbatches that a stage holds comes from the schedule, for
    `microbatches` a step (twice the stages, unless it says otherwise); where ranks hold several stages, `chunks` a
    rank (2), their peaks are taken together, at the same moment. The placement is V-shaped where the schedule is.

    The least memory may be bought with much time: a rank that holds few microbatches gets many layers. `memory` is
    what a rank has anyway, in bytes: peaks up to it count as equal, and time decides.
    """
    name = schedule_name(schedule)
    chunks = stages_a_rank(name, chunks)
    if stages < chunks or stages % chunks:
        raise ValueError(f"{stages} stages: {name} has {chunks} a rank, so expected a multiple of {chunks}")
    if len(costs) < stages:
        raise ValueError(
            f"{stages} stages for {len(costs)} layers (embedding and head included): every stage needs one"
        )
    microbatches = 2 * stages if microbatches is None else microbatches
    ranks = plans(name, ranks=stages // chunks, microbatches=microbatches, chunks=chunks)
    problem = Problem(
        fixed=list(accumulate((cost.parameters for cost in costs), initial=0)),
        passing=list(accumulate((cost.activations for cost in costs), initial=0)),
        time=_ticks([cost.time for cost in costs]),
        stages_of=[plan.stages for plan in ranks],
        held=[_worst(plan) for plan in ranks],
        budget=memory,
    )
    cuts, optimal = solve(problem)
    times = [sum(cost.time for cost in costs[first:last]) for first, last in pairwise(cuts)]
    rank_of = {stage: rank for rank, plan in enumerate(ranks) for stage in plan.stages}
    most = {stage: count for plan in ranks for stage, count in in_flight(plan).items()}
    return Partition(
        schedule=name,
        microbatches=microbatches,
        stages=tuple(
            Stage(
                index=index,
                rank=rank_of[index],
                layers=tuple(cost.name for cost in costs[first:last]),
                first=first,
                parameters=problem.fixed[last] - problem.fixed[first],
                activations=problem.passing[last] - problem.passing[first],
                in_flight=most[index],
                time=times[index],
            )
            for index, (first, last) in enumerate(pairwise(cuts))
        ),
        peaks=tuple(problem.memory(rank, cuts) for rank in range(len(ranks))),
        times=tuple(sum(times[stage] for stage in plan.stages) for plan in ranks),
        optimal=optimal,
    )


def _ticks(times: Sequence[float]) -> list[int]:
    """Running sums of times in whole ticks, a millionth of the longest: finer than any was measured."""
    longest = max(times) or 1.0
    return list(accumulate((round(time / longest * 1_000_000) for time in times), initial=0))


def _worst(plan: Plan) -> list[tuple[int, ...]]:
    """What the rank holds of each stage at the moments that can be its worst: those no other moment exceeds."""
    stages = plan.stages
    seen = {tuple(counts[stage] for stage in stages) for counts in plan.held()}
    return [
        counts
        for counts in sorted(seen)
        if not any(other != counts and all(map(int.__ge__, other, counts)) for other in seen)
    ]
