"""A step with a long steady state, from replays of shorter ones: a microbatch more takes as long as the last."""

from dataclasses import replace

from pagestash.simulation.costs.build import step_costs, with_microbatches
from pagestash.simulation.costs.costs import StepCosts
from pagestash.simulation.costs.run import Run
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
    played = replay(with_microbatches(costs, longer))
    before = played.seconds if longer.microbatches == run.microbatches else replay(costs).seconds
    return played, _lengthened(run, before, played.seconds)


def _lengthened(run: Run, short: float, longer: float) -> float:
    """What is left of a long step goes on as it went before."""
    counts = [shortened(run, times).microbatches for times in (STEADY, 2 * STEADY)]
    more = run.microbatches - counts[1]
    return longer + more * (longer - short) / (counts[1] - counts[0]) if more else longer
