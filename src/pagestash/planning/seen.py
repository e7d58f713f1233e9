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


def seen_tensors(
    step: MeasuredStep, rules: RuleTable, recomputing: Recomputing, when_saved: Sequence[HomeName]
) -> Iterator[SavedTensor]:
    """Weights, too."""
    tensors = step.profile.tensors  # in the order in which they were saved
    seen = step.index.within(name for name, rule in rules.rules.items() if rule.moves)
    if recomputing.regions:
        last_in: dict[str, int] = {}
        """Of each recomputed region, the last tensor that was saved in it."""
        within: dict[tuple[str, ...], list[str]] = {}
        """Of each path, the recomputed regions in it."""
        for at, (tensor, home) in enumerate(zip(tensors, when_saved)):
            if seen[at]:
                path = tensor.path
                if path not in within:
                    within[path] = [name for name in path if name in recomputing.regions]
                for name in within[path]:
                    last_in[name] = at
            elif home == "recompute" and tensor.storage in recomputing.makers:
                since = last_in.get(recomputing.makers[tensor.storage].name, at)
                seen[since : at + 1] = [True] * (at + 1 - since)
    return (tensor for tensor, was in zip(tensors, seen) if was)
