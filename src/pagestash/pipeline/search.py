"""The search behind `partition`: where to cut a list of layers into stages.

Stages are numbered in the order of the model; `cuts[s]` is the first layer of stage s.

    memory of a rank = sum over its stages of `fixed`
                     + max over the schedule's plan of (sum over its stages of microbatches held × `passing`)

The search minimises the largest memory of any rank, then the largest time.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Cuts = tuple[int, ...]
"""The first layer of each stage, then the number of layers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Prefix sums over the layers, and what each rank holds."""

    fixed: Sequence[int]
    """Prefix sums of the bytes that stay for the whole run."""
    passing: Sequence[int]
    """Prefix sums of the bytes that one microbatch saves."""
    time: Sequence[int]
    """Prefix sums of the time of one microbatch, in integer ticks."""
    stages_of: Sequence[tuple[int, ...]]
    """The stages of each rank."""
    held: Sequence[Sequence[tuple[int, ...]]]
    """For each rank, the microbatches held of each of its stages, at every moment that may be its worst."""
    budget: int = 0
    """Memory of a rank that counts as free: placements below it are compared by time alone."""

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
        """A rank's compute time for one microbatch."""
        return sum(self.time[cuts[s + 1]] - self.time[cuts[s]] for s in self.stages_of[rank])

    def worst(self, cuts: Sequence[int]) -> tuple[int, int]:
        """The objective: the largest memory of a rank, at least the budget; then the largest time."""
        ranks = range(len(self.stages_of))
        memory = max(self.memory(r, cuts) for r in ranks)
        return max(memory, self.budget), max(self.rank_time(r, cuts) for r in ranks)

    def unevenness(self, cuts: Sequence[int]) -> int:
        """The tie-breaker: smaller if stages have more equal times, which means fewer bubbles."""
        return sum((self.time[b] - self.time[a]) ** 2 for a, b in itertools.pairwise(cuts))


NODES = 60_000
"""Partial placements that the exact search visits before it gives up, in under a second."""
HOPELESS = 10**9
"""With more placements than this the exact search is not tried."""


def solve(problem: Placement) -> tuple[Cuts, bool]:
    """The best cuts found, and whether they are proven optimal.

    With one stage per rank they always are: each stage is bounded separately, and bisection finds the bound.
    With several stages per rank, far apart in the model, a local search starts from that, and then an exact
    search visits up to `NODES` placements that could be better.
    """
    start = _bounded(problem)
    if all(len(stages) == 1 for stages in problem.stages_of):
        return start, True
    best, proven = _exhaust(problem, _improve(problem, start))
    return _even_out(problem, best), proven


# --- one stage per rank ---


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Prefix sums of each stage's memory, and the limits of a stage."""

    memory: Sequence[Sequence[int]]
    time: Sequence[int]
    most: int
    longest: int

    def end(self, stage: int, start: int) -> int:
        """The last layer boundary where a stage that begins at `start` can end; `start` if there is none."""
        sums = self.memory[stage]
        end = bisect_right(sums, sums[start] + self.most)
        return min(end, bisect_right(self.time, self.time[start] + self.longest)) - 1

    def start(self, stage: int, end: int) -> int:
        """The first layer boundary where a stage that ends at `end` can begin."""
        sums = self.memory[stage]
        start = bisect_left(sums, sums[end] - self.most)
        return max(start, bisect_left(self.time, self.time[end] - self.longest))


def _bounded(problem: Placement) -> Cuts:
    """Cuts that minimise the largest stage, by memory, then by time: optimal with one stage per rank."""
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
    assert found is not None  # there are enough layers
    # A rank's budget is for all its stages; with several, this is only the start of the search.
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


def _reach(problem: Placement, bounds: _Bounds, *, even: bool = False) -> Cuts | None:
    """Cuts within the bounds, or None; with `even`, those with the most equal times.

    Every stage needs at least one layer, so taking the longest prefix is not always right: dynamic programming
    records every boundary where each stage can end, and the best way there.
    """
    layers, stages, time = problem.layers, problem.stages, problem.time
    # The first boundary where each stage may begin, so that the rest reaches the end; near the best bounds few
    # are left.
    first = [0] * stages + [layers]
    for stage in reversed(range(stages)):
        first[stage] = min(bounds.start(stage, first[stage + 1]), layers - (stages - stage))
    if first[0] > 0:
        return None
    ways: list[dict[int, int]] = []  # per stage: where it can end -> where it then begins
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
            if not even:  # any way will do, and starts come in order: skip boundaries that were reached
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
    """The cuts after moving one layer from `stage` to `other`; None if it was the only one.

    The stages between them pass a layer on, so all cuts between them move by one.
    """
    if stage == other or cuts[stage + 1] - cuts[stage] == 1:
        return None
    a, b = (stage, other) if stage < other else (other, stage)
    step = 1 if other < stage else -1
    return (*cuts[: a + 1], *[cut + step for cut in cuts[a + 1 : b + 1]], *cuts[b + 1 :])


def _improve(problem: Placement, cuts: Cuts) -> Cuts:
    """Move layers away from the worst rank as long as that helps."""
    ranks = range(len(problem.stages_of))
    rank_of = {stage: rank for rank, own in enumerate(problem.stages_of) for stage in own}
    known: dict[tuple[int, ...], int] = {}

    def memory(rank: int, tried: Cuts) -> int:
        # The same stages recur often: a move shifts all cuts between two stages by one.
        key = (rank, *[cut for stage in problem.stages_of[rank] for cut in tried[stage : stage + 2]])
        if key not in known:
            known[key] = problem.memory(rank, tried)
        return known[key]

    def score(tried: Cuts) -> tuple[int, ...]:
        # Including the other ranks' memory crosses plateaus: of two worst ranks, first one improves, then the
        # other.
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
                    # Most moves make one of the two ranks worse, which is quickly checked.
                    if tried and memory(rank, tried) <= reached[0] >= memory(rank_of[other], tried):
                        candidate = score(tried)
                        if candidate < reached:
                            best, reached = tried, candidate
        if best == before:
            return best


def _exhaust(problem: Placement, cuts: Cuts) -> tuple[Cuts, bool]:
    """Visit every placement that may be better than `cuts`; False if there were too many."""
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
            # Later stages have no layers yet and cost nothing.
            filled = tried + (end,) * rest
            memory = max(problem.memory(rank, filled), problem.budget)
            if (memory, problem.rank_time(rank, filled)) >= reached:
                break  # more layers only make it worse
            stack.append(tried)
    return best, True


def _even_out(problem: Placement, cuts: Cuts) -> Cuts:
    """Make the times of neighbouring stages more equal, if the objective gets no worse."""
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
