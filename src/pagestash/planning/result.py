"""`Plan`: a policy for a budget, what it is predicted to take, and why."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from pagestash.patterns import number_ranges
from pagestash.planning.budget import describe
from pagestash.planning.lanes import SLOWER_LINK
from pagestash.planning.plot import draw_curve, draw_memory
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling.assign import assign, rule_of
from pagestash.profiling.from_json import load, read
from pagestash.profiling.picture import write
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import Region, SavedTensor
from pagestash.sizes import format_bytes

FORMAT = 1
"""Version of a saved plan; other versions are refused."""
LARGE = 0.25
"""Part of what is kept at the peak: a tensor of that size is named."""


class NothingFits(ValueError):
    """No policy fits the budget; `smallest` is the prediction of the one that comes nearest."""

    def __init__(
        self,
        budget_bytes: int,
        smallest: Prediction,
        region: str,
        without_host: bool,
        rank: int | None = None,
        largest: SavedTensor | None = None,
        unplanned_bytes: int | None = None,
        saves_logits: bool = False,
    ) -> None:
        """`largest`: of the tensors that stay on the device then. `unplanned_bytes`: the peak without a policy."""
        self.unplanned_bytes = unplanned_bytes
        self.saves_logits = saves_logits
        """Whether the head is not fused with its loss."""
        self.budget_bytes, self.smallest = budget_bytes, smallest
        self.rank = rank
        """Of a pipeline."""
        self.largest = largest
        self._region, self._without_host = region, without_host
        host = " Offload had no host memory." if without_host else ""
        who = "" if rank is None else f"rank {rank}: "
        before = "" if unplanned_bytes is None else f" (without a policy {format_bytes(unplanned_bytes)})"
        super().__init__(
            f"{who}nothing fits {format_bytes(budget_bytes)}: the smallest plan takes "
            f"{format_bytes(smallest.peak_bytes)}, {format_bytes(smallest.peak_bytes - budget_bytes)} too much"
            f"{before}. At its peak, in {region}: {describe(smallest)}.{_named(largest, smallest)}{host} "
            f"What would help: {remedies(smallest, saves_logits=saves_logits)}"
        )

    def of_rank(self, rank: int) -> "NothingFits":
        """The same, naming the rank of a pipeline."""
        return NothingFits(
            self.budget_bytes,
            self.smallest,
            self._region,
            self._without_host,
            rank,
            self.largest,
            self.unplanned_bytes,
            self.saves_logits,
        )


REMEDIES = {
    "base": "an optimizer whose state is on the host, or weights on more ranks",
    "logits": "a smaller batch, or a head that is fused with its loss",
}
"""By what holds most of the memory; else a smaller batch."""


def remedies(prediction: Prediction, *, saves_logits: bool = False) -> str:
    """What would take memory off the peak."""
    sizes = prediction.at_peak()
    most = max(sizes, key=sizes.__getitem__)
    return REMEDIES.get("logits" if most == "other" and saves_logits else most, "a smaller batch")


def _named(largest: SavedTensor | None, smallest: Prediction) -> str:
    """The largest kept tensor, in words, if it is a good part of what is kept at the peak."""
    if largest is None or largest.storage_bytes < LARGE * smallest.at_peak()["keep"]:
        return ""
    where = f"in {largest.region}" if largest.region else "outside all modules, where no rule reaches it"
    shape = " × ".join(map(str, largest.shape))
    return (
        f" The largest kept tensor has {format_bytes(largest.storage_bytes)} ({shape}, {largest.dtype}) and was "
        f"saved {where}."
    )


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A rule of a plan: how many layers it is for, what it takes off the device, and the time of their replays."""

    match: str
    home: HomeName
    layers: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fastest policy that was found for a budget; `str(plan)` is a table."""

    policy: Policy
    predicted: Prediction
    unplanned: Prediction
    """The same step without a policy."""
    budget_bytes: int
    turn: int
    """The segment in which backward begins."""
    rows: Sequence[PlanRow] = field(default_factory=list)
    limit: str = ""
    """What keeps the plan from being faster."""
    notes: Sequence[str] = field(default_factory=list)
    curve: Sequence[tuple[int, float]] = field(default_factory=list)
    """Predicted peaks and seconds of all plans that no other beats, the fastest first; none if the step fits."""
    alternatives: Mapping[str, Prediction] = field(default_factory=dict)
    """The same step under policies that one would write by hand: keep all, recompute layers, offload all."""

    measured_bytes: int | None = None
    """The peak of a step under the plan; None if none ran: it is from a profile alone, empty, for a
    pipeline, or of several ranks. For a graph: of an eager step, and what a graph is predicted to take more."""
    measured_seconds: float | None = None
    """The time of a step under the plan; None where `measured_bytes` is, on a CPU, and for a graph."""
    graphed: bool = False
    """Whether it is for a step that runs as a CUDA graph."""
    waits: bool = False
    """Whether it is for a loop that waits for the GPU before each step."""
    planned_for: int | None = None
    """The budget that its prediction keeps: less than `budget_bytes`, if a plan for that takes too much."""

    expected_rows: int | None = None
    """Where rows vary and are stashed: `MoEConfig(expected_rows=...)` that keeps most of them out of the pool, and
    takes next to no memory."""

    regions: Sequence[str] = field(default_factory=list)
    """Regions of the step that are no modules: `keeper.attach(model, plan.regions)` declares them."""
    recomputed_layers: int = 0
    """So many layers were recomputed while the step was measured; the step without a policy is predicted then."""

    @property
    def excess_bytes(self) -> int:
        """How much the checking steps took above the budget."""
        return max(0, (self.measured_bytes or 0) - self.budget_bytes)

    def broken(self, by: int = 0) -> str:
        """In words, that steps exceed the budget, and what to do; `by`: by so much, if not as measured."""
        return (
            f"steps under the plan exceed the budget of {format_bytes(self.budget_bytes)} by "
            f"{format_bytes(by or self.excess_bytes)}. What would help: {remedies(self.predicted)}; or give a "
            "smaller budget than there is memory"
        )

    @property
    def overflow_probability(self) -> float | None:
        """That a step overflows the pool and runs again; None without `rows`, or if nothing is stashed."""
        return self.predicted.pool.overflow

    @property
    def is_empty(self) -> bool:
        """Whether the step fits without a policy."""
        return not self.policy.rules

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; `load` reads it in another run. (`plan.policy.save` writes the rules alone.)"""
        fields = {"format": FORMAT, **asdict(self), "policy": self.policy.to_toml()}
        Path(path).write_text(json.dumps(fields, default=sorted) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        return load(path, "plan", FORMAT, lambda data: read(cls, data, "plan"))

    def plot_curve(self, path: str | Path) -> None:
        """Draw predicted step time over device memory: the best for every budget, the alternatives, this plan."""
        figure = draw_curve(
            curve=self.curve,
            alternatives=self.alternatives,
            chosen=self.predicted,
            budget_bytes=self.budget_bytes,
        )
        write(figure, Path(path))

    def plot_memory(self, path: str | Path) -> None:
        """Draw predicted device memory over the step, without a policy and as planned, by what holds it."""
        figure = draw_memory(
            before=self.unplanned, after=self.predicted, budget_bytes=self.budget_bytes, turn=self.turn
        )
        write(figure, Path(path))

    def __str__(self) -> str:
        if self.is_empty:
            lines = [
                f"The step fits without a policy: {format_bytes(self.unplanned.peak_bytes)} of "
                f"{format_bytes(self.budget_bytes)}, {_ms(self.unplanned.seconds)}{self._how_measured()}."
            ]
            return "\n".join([*lines, *self.notes])
        cells = [("region", "home", "layers", "bytes", "forward again")]
        cells += [
            (
                row.match,
                row.home,
                str(row.layers),
                format_bytes(row.bytes),
                _ms(row.seconds) if row.seconds else "–",
            )
            for row in self.rows
        ]
        widths = [max(len(row[at]) for row in cells) for at in range(5)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  "
            + "  ".join(f"{row[at]:>{widths[at]}}" for at in range(2, 5))
            for row in cells
        ]
        lines.insert(1, "-" * len(lines[0]))
        before, after = self.unplanned, self.predicted
        lines += [
            "",
            f"budget     {format_bytes(self.budget_bytes)}",
            *self._step_line(),
            f"unplanned  {format_bytes(before.peak_bytes)}, {_ms(before.seconds)}{self._how_measured()}",
            f"planned    {format_bytes(after.peak_bytes)}, {_ms(after.seconds)} "
            f"({after.seconds / before.seconds:.3f} of unplanned): recompute {_ms(after.recompute_seconds)}, "
            f"waiting for copies {_ms(after.wait_seconds)}",
            *self._slow_host_line(),
            f"link       {format_bytes(after.moved_bytes)} each way: busy {_ms(after.out_seconds)} out, "
            f"{_ms(after.back_seconds)} back; {format_bytes(after.host_bytes)} on the host",
            f"at peak    {describe(after)}",
            *self._pool_line(),
            f"checked    {self._checked()}",
            f"limit      {self.limit}",
        ]
        return "\n".join([*lines, *self.notes])

    def _step_line(self) -> list[str]:
        if self.graphed:
            return ["step       as a CUDA graph; times without a policy are predicted, too"]
        return ["step       in a loop that waits for the device before each"] if self.waits else []

    def _how_measured(self) -> str:
        if not self.recomputed_layers:
            return ""
        return f" (predicted: it was measured with {self.recomputed_layers} layers recomputed)"

    def _slow_host_line(self) -> list[str]:
        before, after = self.unplanned, self.predicted
        if before.slow_host_seconds == before.seconds and after.slow_host_seconds == after.seconds:
            return []
        return [
            f"slow host  {_ms(after.slow_host_seconds)} if the host takes {after.slower_host:g} times as long and "
            f"copies have {SLOWER_LINK:g} of their rate, unplanned {_ms(before.slow_host_seconds)}"
        ]

    def _checked(self) -> str:
        if self.measured_bytes is None:
            return "not by a step"
        time = "" if self.measured_seconds is None else f", {_ms(self.measured_seconds)}"
        how = "an eager step, with what a graph takes more" if self.graphed else "a step"
        found = f"by {how}: peak measured {format_bytes(self.measured_bytes)}{time}"
        if self.measured_bytes > self.budget_bytes:
            over = format_bytes(self.measured_bytes - self.budget_bytes)
            return f"{found}, {over} above the budget; no plan that is predicted to take less was found"
        if self.planned_for is not None and self.planned_for < self.budget_bytes:
            less = format_bytes(self.budget_bytes - self.planned_for)
            found += f"; planned for {less} less than the budget, to keep it"
        return found

    def _pool_line(self) -> list[str]:
        pool = self.predicted.pool
        if pool.overflow is None:
            return []
        rows = "" if self.expected_rows is None else f"; best with expected_rows={self.expected_rows}"
        return [
            f"pool       {format_bytes(pool.bytes)} for {pool.pairs} times the rows of a layer: "
            f"a step overflows it with probability {pool.overflow:.1g}{rows}"
        ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


_NUMBER = r"(?<![^.])\d+(?![^.])"
"""A part of a dotted name that is a number."""


def policy_of(rules: Mapping[str, Rule], regions: Iterable[Region]) -> Policy:
    """Rules of single regions as few patterns: `layers.*.norm`, or `layers.{0-3}.norm` if not all have it.

    A rule with a `fraction` stays one of its own: which tensors leave depends on all that a rule names.
    """
    known: dict[str, set[str]] = {}
    for region in regions:
        known.setdefault(_pattern(region.name), set()).add(region.name)
    grouped: dict[tuple[str, Rule], list[str]] = {}
    for name, rule in rules.items():
        pattern = _pattern(name) if rule.fraction == 1.0 else name
        grouped.setdefault((pattern, replace(rule, match=pattern)), []).append(name)
    found = []
    for (pattern, rule), names in sorted(grouped.items(), key=lambda item: (item[0][0], item[0][1].home)):
        if pattern != names[0] and known[pattern] != set(names):
            numbers = sorted(int(match[0]) for name in names if (match := re.search(_NUMBER, name)))
            listed = pattern.replace("*", f"{{{number_ranges(numbers)}}}", 1)
            rule = replace(rule, match=names[0] if len(names) == 1 else listed)
        found.append(rule)
    return Policy(found)


def _pattern(name: str) -> str:
    """The name with its first number as `*`."""
    return re.sub(_NUMBER, "*", name, count=1)


def rows_of(
    policy: Policy, profile: ProfiledStep, scale: float, leaving: Collection[int] | None = None
) -> list[PlanRow]:
    """What each rule of the policy is for. `leaving`: the storages that leave the device, or None: all may."""
    moved: dict[Rule, int] = {}
    table = RuleTable.of(policy, profile.regions)
    for tensor, home in zip(profile.tensors, assign(table, profile.tensors, profile.regions)):
        rule, _ = rule_of(table, tensor.path)
        stays = home == "offload" and leaving is not None and tensor.storage not in leaving
        if rule is not None and rule.home == home and not stays:
            moved[rule] = moved.get(rule, 0) + tensor.counted
    rows = []
    for rule in policy.rules:
        regions = [region for region in profile.regions if table.rule_for(region.name) is rule]
        size, seconds = moved.get(rule, 0), 0.0
        if rule.home == "recompute":  # its output, too, which another region saves
            size = sum(region.homes["recompute"].saved_bytes for region in regions)
            seconds = scale * sum(region.homes["recompute"].seconds for region in regions)
        rows.append(PlanRow(rule.match, rule.home, len(regions), size, seconds))
    return rows
