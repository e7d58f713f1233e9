"""The search behind `partition`: where to cut a row of layers so that no rank needs more than it must.

Stages are numbered in the order of the model, `cuts[s]` is the first layer of stage s. A rank's memory is what its
stages' layers keep for good, and the most that the microbatches it holds keep at one time; how many of each of its
stages those are comes from the schedule (`held`). The aim is the smallest largest memory of a rank, then the
smallest largest time.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Cuts = tuple[int, ...]
"""The first layer of each stage, and at the end the number of layers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Running sums over the layers, and who holds what."""

    fixed: Sequence[int]
    """Running sums of the bytes that stay."""
    passing: Sequence[int]
    """Running sums of the bytes of one microbatch."""
    time: Sequence[int]
    """Running sums of the time of one microbatch, in whole ticks."""
    stages_of: Sequence[tuple[int, ...]]
    """The stages of each rank."""
    held: Sequence[Sequence[tuple[int, ...]]]
    """For each rank, microbatches held of each of its stages, at every time that may be the worst."""
    budget: int = 0
    """Bytes that a rank may use without its counting: below it, only time does."""

    @property
    def layers(self) -> int:
        return len(self.fixed) - 1

    @property
    def stages(self) -> int:
        return sum(map(len, self.stages_of))

    def memory(self, rank: int, cuts: Sequence[int]) -> int:
        """Peak bytes of a rank."""
        fixed, passing = self.fixed, self.passing
        stages = self.stages_of[rank]
        kept = sum(fixed[cuts[s + 1]] - fixed[cuts[s]] for s in stages)
        sizes = [passing[cuts[s + 1]] - passing[cuts[s]] for s in stages]
        return kept + max(sum(map(int.__mul__, counts, sizes)) for counts in self.held[rank])

    def rank_time(self, rank: int, cuts: Sequence[int]) -> int:
        """Time that a rank computes for one microbatch."""
        return sum(self.time[cuts[s + 1]] - self.time[cuts[s]] for s in self.stages_of[rank])

    def worst(self, cuts: Sequence[int]) -> tuple[int, int]:
        """What is to be smallest: the largest memory of a rank beyond the budget, then the largest time."""
        ranks = range(len(self.stages_of))
        memory = max(self.memory(r, cuts) for r in ranks)
        return max(memory, self.budget), max(self.rank_time(r, cuts) for r in ranks)

    def unevenness(self, cuts: Sequence[int]) -> int:
        """Among placements that are as good, the smallest has stages of the most equal times: fewer bubbles."""
        return sum((self.time[b] - self.time[a]) ** 2 for a, b in itertools.pairwise(cuts))


NODES = 60_000
"""Partial placements that the exact search of several stages a rank looks at before it gives up: under a second."""
HOPELESS = 10**9
"""Placements beyond which it does not begin."""


def solve(problem: Problem) -> tuple[Cuts, bool]:
    """The best cuts found, and whether none are better.

    With one stage a rank that is always so: each stage is bounded on its own, and the bound is found by bisection.
    Where ranks hold several stages, far apart in the model, the best placement is a search: local moves from
    stages of equal size, then all others that could be better, as far as `NODES` go.
    """
    start = _bounded(problem)
    if all(len(stages) == 1 for stages in problem.stages_of):
        return start, True
    best, proven = _exhaust(problem, _improve(problem, start))
    return _even_out(problem, best), proven


# --- every stage on its own ---


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Running sums of each stage's memory, and what no stage may exceed."""

    memory: Sequence[Sequence[int]]
    time: Sequence[int]
    most: int
    longest: int

    def end(self, stage: int, start: int) -> int:
        """The last place where a stage that begins at `start` can end; `start` itself: nowhere."""
        sums = self.memory[stage]
        end = bisect_right(sums, sums[start] + self.most)
        return min(end, bisect_right(self.time, self.time[start] + self.longest)) - 1

    def start(self, stage: int, end: int) -> int:
        """The first place where a stage that ends at `end` can begin."""
        sums = self.memory[stage]
        start = bisect_left(sums, sums[end] - self.most)
        return max(start, bisect_left(self.time, self.time[end] - self.longest))


def _bounded(problem: Problem) -> Cuts:
    """Cuts whose largest stage is smallest, by memory, then by time: optimal where every rank has one stage."""
    weight = {
        stage: max(counts[place] for counts in held)
        for stages, held in zip(problem.stages_of, problem.held)
        for place, stage in enumerate(stages)
    }
    stages, time = range(problem.stages), problem.time
    memory = [[f + weight[s] * p for f, p in zip(problem.fixed, problem.passing)] for s in stages]

    def largest(cuts: Cuts) -> int:
        return max(memory[s][cuts[s + 1]] - memory[s][cuts[s]] for s in stages)

    def slowest(cuts: Cuts) -> int:
        return max(time[b] - time[a] for a, b in itertools.pairwise(cuts))

    whole = max(sums[-1] for sums in memory)
    found = _reach(problem, _Bounds(memory, time, whole, time[-1]))
    assert found is not None  # there are layers enough
    # A rank's budget is for all its stages; where it has several, this is only where the search begins.
    budget = problem.budget // max(map(len, problem.stages_of))
    low, most = budget - 1, max(largest(found), budget)
    while most - low > 1:
        middle = (low + most) // 2
        better = _reach(problem, _Bounds(memory, time, middle, time[-1]))
        if better is None:
            low = middle
        else:
            found, most = better, max(largest(better), budget)
    low, longest = -1, slowest(found)
    while longest - low > 1:
        middle = (low + longest) // 2
        better = _reach(problem, _Bounds(memory, time, most, middle))
        if better is None:
            low = middle
        else:
            found, longest = better, slowest(better)
    return _reach(problem, _Bounds(memory, time, most, longest), even=True) or found


def _reach(problem: Problem, bounds: _Bounds, *, even: bool = False) -> Cuts | None:
    """Cuts that keep the bounds, or None; with `even`, those of the most equal times.

    Every stage has a layer at least, so the longest prefix is not always the right one to take: each stage notes
    all places where it can end, and the best way there.
    """
    layers, stages, time = problem.layers, problem.stages, problem.time
    # Where each stage must begin, so that the rest gets to the end: few places are left near the best bounds.
    first = [0] * stages + [layers]
    for stage in reversed(range(stages)):
        first[stage] = min(bounds.start(stage, first[stage + 1]), layers - (stages - stage))
    if first[0] > 0:
        return None
    ways: list[dict[int, int]] = []  # for each stage: where it can end, and where it then begins
    costs = {0: 0}
    for stage in range(stages):
        came: dict[int, int] = {}
        reached: dict[int, int] = {}
        last = layers - (stages - stage - 1)
        begin = first[stage + 1]
        for start, cost in costs.items():
            stop = min(last, bounds.end(stage, start))
            for end in range(max(start + 1, begin), stop + 1):
                uneven = cost + (time[end] - time[start]) ** 2
                if end not in reached or uneven < reached[end]:
                    reached[end], came[end] = uneven, start
            if not even:  # any way will do, and starts come in order: what was reached needs no second look
                begin = max(begin, stop + 1)
        if not came:
            return None
        ways.append(came)
        costs = reached
    if layers not in costs:
        return None
    cuts = [layers]
    for came in reversed(ways):
        cuts.append(came[cuts[-1]])
    return tuple(reversed(cuts))


# --- ranks with several stages ---


def _moved(cuts: Cuts, stage: int, other: int) -> Cuts | None:
    """The cuts after one layer of `stage` has gone to `other`; None if it was its last.

    The stages between the two pass a layer on, so all cuts between them move by one.
    """
    if stage == other or cuts[stage + 1] - cuts[stage] == 1:
        return None
    a, b = (stage, other) if stage < other else (other, stage)
    step = 1 if other < stage else -1
    return (*cuts[: a + 1], *[cut + step for cut in cuts[a + 1 : b + 1]], *cuts[b + 1 :])


def _improve(problem: Problem, cuts: Cuts) -> Cuts:
    """Take layers from the worst rank, while that helps."""
    ranks = range(len(problem.stages_of))
    rank_of = {stage: rank for rank, own in enumerate(problem.stages_of) for stage in own}
    known: dict[tuple[int, ...], int] = {}

    def memory(rank: int, tried: Cuts) -> int:
        # The same stages turn up again and again: a move shifts all cuts between two stages alike.
        key = (rank, *[cut for stage in problem.stages_of[rank] for cut in tried[stage : stage + 2]])
        if key not in known:
            known[key] = problem.memory(rank, tried)
        return known[key]

    def score(tried: Cuts) -> tuple[int, ...]:
        # The other ranks' memory leads over plateaus: two ranks at the worst are mended one after the other.
        sizes = sorted([memory(rank, tried) for rank in ranks], reverse=True)
        slowest = max(problem.rank_time(rank, tried) for rank in ranks)
        return (max(sizes[0], problem.budget), slowest, *sizes)

    best, reached = cuts, score(cuts)
    while True:
        before = best
        largest = max(ranks, key=lambda rank: memory(rank, best))
        slowest = max(ranks, key=lambda rank: problem.rank_time(rank, best))
        for rank in {largest, slowest}:
            for stage in problem.stages_of[rank]:
                for other in range(problem.stages):
                    tried = _moved(best, stage, other)
                    # Most moves are bad for one of the two ranks, which is quickly seen.
                    if tried and memory(rank, tried) <= reached[0] >= memory(rank_of[other], tried):
                        candidate = score(tried)
                        if candidate < reached:
                            best, reached = tried, candidate
        if best == before:
            return best


def _exhaust(problem: Problem, cuts: Cuts) -> tuple[Cuts, bool]:
    """Look at every placement that may be better than `cuts`; False if there were too many."""
    layers, stages = problem.layers, problem.stages
    if math.comb(layers - 1, stages - 1) > HOPELESS:
        return cuts, False
    rank_of = {stage: rank for rank, own in enumerate(problem.stages_of) for stage in own}
    best, reached = cuts, problem.worst(cuts)
    looked = 0
    stack: list[Cuts] = [(0,)]
    while stack:
        placed = stack.pop()
        stage = len(placed) - 1
        if stage == stages:
            if (candidate := problem.worst(placed)) < reached:
                best, reached = placed, candidate
            continue
        rank, rest = rank_of[stage], stages - stage - 1
        for end in range(placed[-1] + 1, layers - rest + 1) if rest else (layers,):
            looked += 1
            if looked > NODES:
                return best, False
            tried = (*placed, end)
            # Stages to come have no layers yet, and cost nothing.
            filled = tried + (end,) * rest
            memory = max(problem.memory(rank, filled), problem.budget)
            if (memory, problem.rank_time(rank, filled)) >= reached:
                break  # and more layers only make it worse
            stack.append(tried)
    return best, True


def _even_out(problem: Problem, cuts: Cuts) -> Cuts:
    """Make the times of neighbouring stages more equal where that makes nothing worse."""
    best, worst, uneven = cuts, problem.worst(cuts), problem.unevenness(cuts)
    while True:
        before = best
        for stage in range(problem.stages):
            for other in (stage - 1, stage + 1):
                tried = _moved(best, stage, other) if 0 <= other < problem.stages else None
                if tried and problem.unevenness(tried) < uneven and problem.worst(tried) <= worst:
                    best, worst, uneven = tried, problem.worst(tried), problem.unevenness(tried)
        if best == before:
            return best
