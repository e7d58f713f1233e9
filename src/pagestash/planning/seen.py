"""The saved tensors that a keeper's hooks see under a policy, in steps that are like those before.

Each costs the host time. They are those of `saved/watch.py`: what is saved in regions whose rule moves tensors, and
all that is saved after a recomputed region until its outputs were saved for the last time.
"""

from collections.abc import Iterator, Sequence

from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.prediction import RuleTable
from pagestash.policy import HomeName
from pagestash.profiling.assign import Recomputing
from pagestash.profiling.records import SavedTensor
from pagestash.saved.watch import moves


def seen_tensors(
    step: MeasuredStep, rules: RuleTable, recomputing: Recomputing, when_saved: Sequence[HomeName]
) -> Iterator[SavedTensor]:
    """Weights, too."""
    tensors = step.profile.tensors
    inside = [moves(rule) for rule, _ in step.index.rules(rules)]
    until: dict[int, int] = {}
    """From a segment in which a recomputed region ends: the last in which its outputs are saved."""
    for tensor, moved, home in zip(tensors, inside, when_saved):
        if home == "recompute" and not moved:
            maker = recomputing.makers.get(tensor.storage)
            ends = () if maker is None else step.forward_of(maker.within)
            before = [at for at in ends if at <= tensor.saved_at]
            if before:
                until[before[-1]] = max(tensor.saved_at, until.get(before[-1], 0))
    seen_at, last = [False] * step.count, -1
    for at in range(step.turn if until else 0):
        last = max(last, until.get(at, -1))
        seen_at[at] = at <= last
    return (tensor for tensor, moved in zip(tensors, inside) if moved or seen_at[tensor.saved_at])
