"""`plan_pipeline`: which layers are on which rank, and under which policy.

Layers are placed and ranks are planned in turn:

    place   `partition` divides the layers by memory, then by time
    plan    every rank gets the fastest policy that fits (`planning/`), with its own microbatches in flight
    again   a layer now takes what its rank's policy adds to it, and saves what the policy keeps of it

That is done for a few amounts of memory which do not depend on the budget (`PARTS`). Each placement that comes of
it is then planned for the budget, and the one is taken whose step, with all ranks waiting for each other, is
predicted to be the shortest. More memory is never slower:

- The placements are the same for every budget.
- In a placement, a rank that fits without a policy has none, which is the fastest for each of its actions.
- A plan with fewer seconds in all may be slower in an action that others wait for. So the other ranks are planned
  for every amount of memory up to the budget that makes a difference, and the shortest step counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagestash.pipeline.costs import LayerCost
from pagestash.pipeline.cut import WholeModel
from pagestash.pipeline.stages import Partition, at_costs, partition
from pagestash.planning.budget import notes_on, parse_budget, parse_host
from pagestash.planning.candidates import Candidate, unbeaten
from pagestash.planning.choose import choose, find_candidates
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.planning.rank import RankPredictor, RankStep
from pagestash.planning.result import NothingFits, Plan
from pagestash.policy import Policy, PoolConfig
from pagestash.profiling.profiled import ProfiledStep
from pagestash.schedules.plan import Action, plans, schedule_name, stages_a_rank
from pagestash.schedules.plan import Plan as Order
from pagestash.sizes import format_bytes

PARTS = (0.75, 0.5, 0.25, 0.0)
"""Amounts of memory for which layers are placed, as parts of what the fullest rank saves without policies."""
ROUNDS = 3
"""Placements for each of them, at the most."""
UNBOUNDED = 1 << 60
"""So much memory that layers are placed by time alone."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: its layers and its plan."""

    rank: int
    layers: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A placement and a policy for each rank; `str(plan)` is a table."""

    placed: Partition
    """Where the layers are, with what they save and take without policies."""
    ranks: tuple[RankPlan, ...]
    seconds: float
    """Of a step: the ranks wait for each other, and messages take no time."""
    budget_bytes: int
    rounds: int
    """Placements that were planned."""

    def save(self, folder: str | Path) -> list[Path]:
        """Write one policy a rank, `rank0.toml` and so on; returns the paths."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = [Path(folder) / f"rank{own.rank}.toml" for own in self.ranks]
        for path, own in zip(paths, self.ranks):
            own.plan.policy.save(path)
        return paths

    def __str__(self) -> str:
        cells = [("rank", "layers", "peak", "unplanned", "busy", "unplanned")]
        for own in self.ranks:
            before, after = own.plan.unplanned, own.plan.predicted
            sizes = (format_bytes(after.peak_bytes), format_bytes(before.peak_bytes))
            times = (f"{1e3 * after.seconds:.1f} ms", f"{1e3 * before.seconds:.1f} ms")
            cells.append((str(own.rank), _span(own.layers), *sizes, *times))
        widths = [max(len(row[at]) for row in cells) for at in range(6)]
        heading, *rows = (
            "  ".join(f"{cell:<{width}}" if at == 1 else f"{cell:>{width}}" for at, (cell, width) in own)
            for own in (list(enumerate(zip(row, widths))) for row in cells)
        )
        lines = [heading, "-" * len(heading)]
        for row, own in zip(rows, self.ranks):
            rules = [f"{rule.home} {rule.match}" for rule in own.plan.policy.rules] or ["keep"]
            lines += [row, *(f"      {rule}" for rule in rules)]
        busy = max(own.plan.predicted.seconds for own in self.ranks)
        lines += [
            "",
            f"schedule  {self.placed.schedule}, {self.placed.microbatches} microbatches; "
            f"placements planned: {self.rounds}",
            f"budget    {format_bytes(self.budget_bytes)} a rank",
            f"step      {1e3 * self.seconds:.1f} ms, of which the busiest rank computes {1e3 * busy:.1f} ms",
        ]
        notes = dict.fromkeys(note for own in self.ranks for note in own.plan.notes)
        return "\n".join([*(line.rstrip() for line in lines), *notes])


def plan_pipeline(
    profile: ProfiledStep,
    *,
    schedule: str,
    ranks: int,
    budget: str | float,
    microbatches: int | None = None,
    chunks: int | None = None,
    host: str | int = "auto",
    optimizer_bytes: int = 0,
    parameters: Mapping[str, int] | None = None,
) -> PipelinePlan:
    """Place the layers of a profiled model on `ranks`, and plan every rank's policy for `budget`.

        found = plan_pipeline(profile, schedule="1F1B", ranks=4, microbatches=8, budget="40GiB")
        print(found)
        found.save("policies")          # rank0.toml, rank1.toml, …

    The profiled batch is one microbatch. `budget`, as for `ps.plan`, is what each rank has; a part is of what the
    fullest rank saves. `host` is the pinned memory of each rank. `optimizer_bytes` is the whole model's state,
    `parameters` the weights' bytes by layer (default: the profile's). `chunks` is the number of stages per rank,
    where the schedule leaves the choice.

    Raises `NothingFits`, which names the rank, if no placement fits.
    """
    name = schedule_name(schedule)
    chunks = stages_a_rank(name, chunks)
    stages = ranks * chunks
    count = 2 * stages if microbatches is None else microbatches
    model = WholeModel(profile, parameters)
    orders = plans(name, ranks=ranks, microbatches=count, chunks=chunks)
    solver = _Solver(model, orders, parse_host(host), optimizer_bytes)

    def place(costs: Sequence[LayerCost], memory: int) -> Partition:
        return partition(costs, stages, name, microbatches=count, chunks=chunks, memory=memory)

    costs = model.costs(optimizer_bytes)
    by_time = place(costs, UNBOUNDED)

    def memory(asked: str | float) -> int:
        unplanned = (solver.rank(by_time, rank).unplanned for rank in range(ranks))
        return max(parse_budget(asked, own, profile.device) for own in unplanned)

    limit = memory(budget)
    placements = {cuts_of(by_time): by_time}
    for part in PARTS:
        level, changed = memory(part) if part else 0, costs
        for _ in range(ROUNDS):
            placed = place(changed, level)
            known = cuts_of(placed) in placements
            placements.setdefault(cuts_of(placed), placed)
            if known and changed is not costs:
                break
            changed = solver.changed(costs, placed, level)
    found = [solver.planned(placed, limit) for placed in placements.values()]
    fitting = [each for each in found if isinstance(each, PipelinePlan)]
    if not fitting:
        refused = (each for each in found if isinstance(each, NothingFits))
        raise min(refused, key=lambda error: error.smallest.peak_bytes)
    return replace(min(fitting, key=lambda each: each.seconds), rounds=len(placements))


def cuts_of(placed: Partition) -> tuple[int, ...]:
    """Where its stages begin."""
    return tuple(stage.first for stage in placed.stages)


@dataclass(slots=True)
class _Rank:
    """A rank's step with some layers, and its candidates once they are needed."""

    step: RankStep
    unplanned: Prediction
    candidates: list[Candidate] | None = None


@dataclass(slots=True)
class _Solver:
    """Plans ranks; what was solved for a rank and its layers is kept."""

    model: WholeModel
    orders: Sequence[Order]
    host_bytes: int
    optimizer_bytes: int
    known: dict[tuple[int, ...], _Rank] = field(default_factory=dict)

    def rank(self, placed: Partition, rank: int) -> _Rank:
        own = placed.of_rank(rank)
        key = (rank, *(number for stage in own for number in (stage.first, len(stage.layers))))
        if key not in self.known:
            stages = [self.model.stage(s.index, s.first, s.first + len(s.layers)) for s in own]
            names = {layer for stage in own for layer in stage.layers}
            costs = self.model.costs(self.optimizer_bytes)
            base = sum(cost.parameters for cost in costs if cost.name in names)
            step = RankStep(stages, self.orders[rank], base)
            self.known[key] = _Rank(step, RankPredictor(step).predict(RuleTable({}, PoolConfig())))
        return self.known[key]

    def candidates(self, own: _Rank) -> list[Candidate]:
        if own.candidates is None:
            own.candidates = find_candidates(own.step, self.host_bytes)
        return own.candidates

    def plan(self, placed: Partition, rank: int, limit: int) -> Plan:
        own = self.rank(placed, rank)
        if own.unplanned.peak_bytes <= limit:
            return Plan(
                policy=Policy(),
                predicted=own.unplanned,
                unplanned=own.unplanned,
                budget_bytes=limit,
                turn=own.step.turn,
                notes=notes_on(own.step.profile),
            )
        try:
            return choose(own.step, own.unplanned, limit, self.host_bytes, self.candidates(own))
        except NothingFits as error:
            raise error.of_rank(rank) from None

    def planned(self, placed: Partition, limit: int) -> PipelinePlan | NothingFits:
        """All ranks of a placement; the refusal of the rank that misses by the most, if one has no plan."""
        refused: list[NothingFits] = []
        for rank in range(len(self.orders)):
            try:
                self.plan(placed, rank, limit)
            except NothingFits as error:
                refused.append(error)
        if refused:
            return max(refused, key=lambda error: error.smallest.peak_bytes)
        seconds, limits = self._shortest(placed, limit)
        found = []
        for rank, own in enumerate(limits):
            layers = tuple(layer for stage in placed.of_rank(rank) for layer in stage.layers)
            plan = replace(self.plan(placed, rank, own), budget_bytes=limit)
            found.append(RankPlan(rank, layers, plan))
        return PipelinePlan(
            placed=at_costs(placed, self.model.costs(self.optimizer_bytes)),
            ranks=tuple(found),
            seconds=seconds,
            budget_bytes=limit,
            rounds=0,
        )

    def _shortest(self, placed: Partition, limit: int) -> tuple[float, list[int]]:
        """The shortest step of a placement, and the memory for which each rank is planned then."""
        ranks = [self.rank(placed, rank) for rank in range(len(self.orders))]
        fronts = [
            [own.unplanned]
            if own.unplanned.peak_bytes <= limit
            else [item.predicted for item in unbeaten(self.candidates(own))]
            for own in ranks
        ]
        known: dict[tuple[int, int], list[float]] = {}

        def actions(rank: int, predicted: Prediction) -> list[float]:
            key = rank, id(predicted)
            if key not in known:
                known[key] = ranks[rank].step.action_seconds(predicted)
            return known[key]

        peaks = {item.peak_bytes for front in fronts if len(front) > 1 for item in front}
        best, best_limits = float("inf"), [limit] * len(ranks)
        for level in [limit, *sorted((peak for peak in peaks if peak < limit), reverse=True)]:
            chosen = [_fastest(front, level if len(front) > 1 else limit) for front in fronts]
            fitting = [item for item in chosen if item is not None]
            if len(fitting) < len(ranks) or max(item.seconds for item in fitting) >= best:
                break  # with less memory ranks take longer still, each by itself
            seconds = pipeline_seconds(
                self.orders, [actions(rank, item) for rank, item in enumerate(fitting)]
            )
            if seconds < best:
                best = seconds
                best_limits = [level if len(front) > 1 else limit for front in fronts]
        return best, best_limits

    def changed(self, costs: Sequence[LayerCost], placed: Partition, limit: int) -> list[LayerCost]:
        """The costs of layers under the policies of their ranks, in this placement."""
        changes: dict[str, tuple[float, float]] = {}
        for rank in range(len(self.orders)):
            own = self.rank(placed, rank)
            try:
                after = self.plan(placed, rank, limit).predicted
            except NothingFits as error:
                after = error.smallest
            before = own.unplanned
            saved, kept = (max(max(item.memory["keep"]), 1) for item in (before, after))
            for stage in placed.of_rank(rank):
                for layer in stage.layers:
                    changes[layer] = after.seconds / before.seconds if before.seconds else 1.0, kept / saved
        return [
            replace(
                cost,
                forward=cost.forward * changes[cost.name][0],
                backward=cost.backward * changes[cost.name][0],
                activations=int(cost.activations * changes[cost.name][1]),
            )
            for cost in costs
        ]


def pipeline_seconds(orders: Sequence[Order], seconds: Sequence[Sequence[float]]) -> float:
    """How long a step takes whose ranks run their actions in order, for so long, and wait for each other.

    `F` waits for the `F` of the stage before, `B` and `I` for those of the stage after.
    """
    done: dict[Action, float] = {}
    clock = [0.0] * len(orders)
    at = [0] * len(orders)
    last = max(max(order.stages) for order in orders)
    while any(place < len(order.actions) for place, order in zip(at, orders)):
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order.actions):
                action = order.actions[at[rank]]
                needs = _needs(action, last)
                if needs and not any(need in done for need in needs):
                    break
                ready = max((done[need] for need in needs if need in done), default=0.0)
                clock[rank] = done[action] = max(clock[rank], ready) + seconds[rank][at[rank]]
                at[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the schedule waits for itself: an action needs one that comes after it")
    return max(clock)


def _fastest(front: Sequence[Prediction], limit: int) -> Prediction | None:
    """The first that fits, of predictions with the fastest first."""
    return next((item for item in front if item.peak_bytes <= limit), None)


def _needs(action: Action, last: int) -> list[Action]:
    """Actions of other stages of which one must be over before this one."""
    if action.kind == "F" and action.stage:
        return [Action("F", action.stage - 1, action.microbatch)]
    if action.kind in "BI" and action.stage < last:
        return [Action(kind, action.stage + 1, action.microbatch) for kind in ("B", "I")]
    return []


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
