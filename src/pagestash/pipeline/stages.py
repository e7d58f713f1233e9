"""`partition`: which layers are on which stage."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from pagestash.pipeline.costs import LayerCost
from pagestash.pipeline.search import Placement, solve
from pagestash.schedules.plan import Plan, in_flight, plans, schedule_name, stages_a_rank


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of the model, with their costs."""

    index: int
    rank: int
    layers: tuple[str, ...]
    first: int
    """Index of its first layer in the list of costs."""
    parameters: int
    activations: int
    """Bytes saved per microbatch."""
    in_flight: int
    """The most microbatches that it holds at one time."""
    time: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages in the order of the model, and each rank's peak bytes and time."""

    schedule: str
    microbatches: int
    stages: tuple[Stage, ...]
    peaks: tuple[int, ...]
    """Per rank: parameters of all its stages, plus the peak of what its microbatches in flight save."""
    times: tuple[float, ...]
    """Per rank: forward and backward of one microbatch through all its stages."""
    optimal: bool
    """Whether the placement is proven optimal; False: the best that was found."""

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
    overlap: bool = False,
) -> Partition:
    """Place layers on stages so that the largest peak memory of a rank is smallest, then the largest time.

        costs = layer_costs(preset("qwen3-30b-a3b"), tokens=4096)      # of pagestash.models.costs
        placed = partition(costs, 8, "DualPipeV", microbatches=16)
        placed.stages[0].layers                                         # ('embed', 'layers.0', …)

    Every stage gets at least one layer. The schedule determines how many microbatches a stage holds, for
    `microbatches` per step (default: twice the stages). With several stages per rank (`chunks`, default 2)
    their bytes are added moment by moment. V-shaped schedules get a V-shaped placement.

    Minimal memory can cost time: a rank with few microbatches in flight gets many layers. `memory` is the
    memory of a rank in bytes: peaks below it count as equal, and time decides. `overlap`: for the schedule that
    `overlapped_schedule` makes, which may hold more microbatches.
    """
    name = schedule_name(schedule)
    chunks = stages_a_rank(name, chunks)
    if stages < chunks or stages % chunks:
        raise ValueError(f"{stages} stages: {name} has {chunks} per rank, so expected a multiple of {chunks}")
    if len(costs) < stages:
        raise ValueError(
            f"{stages} stages for {len(costs)} layers (embedding and head included): every stage needs one"
        )
    microbatches = 2 * stages if microbatches is None else microbatches
    ranks = plans(name, ranks=stages // chunks, microbatches=microbatches, chunks=chunks, overlap=overlap)
    problem = _problem(costs, ranks, memory)
    cuts, optimal = solve(problem)
    return _partition(problem, name, microbatches, costs, ranks, cuts, optimal=optimal)


def at_costs(placed: Partition, costs: Sequence[LayerCost]) -> Partition:
    """The same placement, for layers that cost something else."""
    chunks = len(placed.stages) // len(placed.peaks)
    ranks = plans(placed.schedule, ranks=len(placed.peaks), microbatches=placed.microbatches, chunks=chunks)
    cuts = (*(stage.first for stage in placed.stages), len(costs))
    problem, count = _problem(costs, ranks), placed.microbatches
    return _partition(problem, placed.schedule, count, costs, ranks, cuts, optimal=placed.optimal)


def _problem(costs: Sequence[LayerCost], ranks: Sequence[Plan], memory: int = 0) -> Placement:
    return Placement(
        fixed=list(accumulate((cost.parameters for cost in costs), initial=0)),
        passing=list(accumulate((cost.activations for cost in costs), initial=0)),
        time=_ticks([cost.time for cost in costs]),
        stages_of=[plan.stages for plan in ranks],
        held=[_worst(plan) for plan in ranks],
        budget=memory,
    )


def _partition(
    problem: Placement,
    name: str,
    microbatches: int,
    costs: Sequence[LayerCost],
    ranks: Sequence[Plan],
    cuts: Sequence[int],
    *,
    optimal: bool,
) -> Partition:
    """What a placement costs."""
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
    """Prefix sums of times in integer ticks of a millionth of the longest, finer than any measurement."""
    longest = max(times) or 1.0
    return list(accumulate((round(time / longest * 1_000_000) for time in times), initial=0))


def _worst(plan: Plan) -> list[tuple[int, ...]]:
    """The microbatches that the rank holds of each stage, at all moments that no other moment exceeds."""
    stages = plan.stages
    seen = {tuple(counts[stage] for stage in stages) for counts in plan.held()}
    return [
        counts
        for counts in sorted(seen)
        if not any(other != counts and all(map(int.__ge__, other, counts)) for other in seen)
    ]
