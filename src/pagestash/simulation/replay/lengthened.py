"""A step with a long steady state, from replays of shorter ones: a microbatch more takes as long as the last."""

from dataclasses import replace

from pagestash.simulation.costs.build import plans_of, step_costs
from pagestash.simulation.costs.costs import StepCosts
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.played import Replay
from pagestash.simulation.replay.replay import replay

STEADY = 2
"""Times the pipeline's ranks: microbatches from which on a schedule only repeats itself."""


def shortened(run: Run, times: int = STEADY) -> Run:
    """The run with the fewest microbatches that have a steady state."""
    count = min(run.microbatches, times * run.layout.pp)
    return replace(run, global_batch=count * run.layout.dp * run.microbatch)


def step_seconds(run: Run, costs: StepCosts | None = None) -> tuple[Replay, float]:
    """A replay, and the seconds of the whole step; `costs` are those of the shortened run."""
    short, longer = shortened(run, STEADY), shortened(run, 2 * STEADY)
    costs = costs or step_costs(short)
    ranks = tuple(replace(rank, plan=plan) for rank, plan in zip(costs.ranks, plans_of(longer)))
    played = replay(replace(costs, ranks=ranks))
    more = run.microbatches - longer.microbatches
    if not more:
        return played, played.seconds
    each = (played.seconds - replay(costs).seconds) / (longer.microbatches - short.microbatches)
    return played, played.seconds + more * each
