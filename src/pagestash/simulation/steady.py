"""A step with a long steady state, from replays of shorter ones: a microbatch more takes as long as the last."""

from dataclasses import replace

from pagestash.simulation.build import Run, step_costs
from pagestash.simulation.played import Replay
from pagestash.simulation.replay import replay

STEADY = 2
"""Times the pipeline's ranks: microbatches from which on a schedule only repeats itself."""


def shortened(run: Run, times: int = STEADY) -> Run:
    """The run with the fewest microbatches that have a steady state."""
    count = min(run.microbatches, times * run.layout.pp)
    return replace(run, global_batch=count * run.layout.dp * run.microbatch)


def step_seconds(run: Run) -> tuple[Replay, float]:
    """A replay, and the seconds of the whole step: what is left of a long one goes on as it went before."""
    short, longer = shortened(run, STEADY), shortened(run, 2 * STEADY)
    played = replay(step_costs(longer))
    more = run.microbatches - longer.microbatches
    if not more:
        return played, played.seconds
    before = replay(step_costs(short)).seconds
    each = (played.seconds - before) / (longer.microbatches - short.microbatches)
    return played, played.seconds + more * each
