"""The peak of a pipeline rank: what it holds for the whole run, what its schedule holds, and the module at work.

    peak = static + max over the plan's actions of ( held + offloaded on the device + at work )

`held` are microbatches in flight times what stays of each, from the schedule's own plan. A backward works from its
last module to its first: before a module, what later modules saved is free again, but for what CUDA graphs keep; it
has its temporary tensors, the gradient of the residual stream, and what a replay brings back. With overlap, another
microbatch's forward is at work beside it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from pagestash.policy import PoolConfig
from pagestash.saved.offload.plan import Event, GroupBytes, Key, make_plan
from pagestash.schedules.plan import Plan, immediate_backwards
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.costs import RankPeak
from pagestash.simulation.model.framework import Margin, ParameterBytes
from pagestash.simulation.model.homes import Placed
from pagestash.simulation.model.parts import Layer, Part

HELD_PATTERN = 4
"""Times the stages: microbatches after which a schedule's pattern of offloads repeats."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """A layer's saved tensors, each with its home; of layers that are alike, one is enough."""

    layer: Layer
    placed: Sequence[Placed]
    stream: int
    """Bytes of the residual stream's gradient."""
    rows: float = 1.0
    """Received rows over balanced rows."""
    capacity: float = 0.0
    """Rows of static buffers over balanced rows; 0: buffers have the rows that came."""
    product_workspace: int = 0
    """Bytes that a product has as its workspace."""
    graphed: frozenset[str] = frozenset()
    """Parts whose tensors belong to CUDA graphs: they are there for the whole run."""
    delayed: int = 0
    """Bytes of an element of gradients that wait, with the inputs of products, for weight gradients at the layer's
    end; 0: weight gradients are computed with the others."""

    def size(self, placed: Placed) -> int:
        """Device bytes of a tensor that is not in pages: static buffers hold their whole capacity."""
        return round(placed.bytes * self.buffers) if placed.routed else placed.bytes

    def valid(self, placed: Placed) -> int:
        """Its valid bytes, which is what leaves the device or goes to pages."""
        return round(placed.bytes * self.rows) if placed.routed else placed.bytes

    @property
    def buffers(self) -> float:
        """Rows of a buffer over balanced rows."""
        return self.capacity or self.rows

    @cached_property
    def kept(self) -> int:
        """What stays between forward and backward."""
        return sum(self.size(item) for item in self.placed if item.home == "keep")

    @cached_property
    def beside(self) -> int:
        """What its forward takes beside another layer's backward: what it keeps, and rows that leave and arrive."""
        rows = round(2 * self.buffers * self.layer.dispatch_bytes)
        return self.kept + rows if rows else 0

    @cached_property
    def graph_buffers(self) -> int:
        """What CUDA graphs have of their own: a pool for temporary tensors of backward, and static gradients."""
        work = [self._work(part) for part in self.layer.parts if part.name in self.graphed]
        return max(work) + 2 * self.stream if work else 0

    def _work(self, part: Part) -> int:
        """Temporary bytes of a part's backward."""
        work = round(part.temporary * (self.buffers if part.routed else 1))
        return work + part.weight_gradient + (self.product_workspace if part.products else 0)

    def _waiting(self, part: Part) -> int:
        """Gradients of a part's products that delayed weight gradients wait with."""
        found = self.delayed * sum(product.groups * product.m * product.n for product in part.products)
        return round(found * (self.buffers if part.routed else 1))

    @cached_property
    def stashed(self) -> int:
        """Bytes in pages."""
        return sum(self.valid(item) for item in self.placed if item.home == "stash")

    @cached_property
    def groups(self) -> list[tuple[str, GroupBytes]]:
        """Offloaded bytes by the region of their rule, in the order of forward."""
        moved = (item for item in self.placed if item.home == "offload")
        grouped = groupby(moved, lambda item: (item.scope, item.window))
        sizes = ((scope, window, sum(map(self.valid, items))) for (scope, window), items in grouped)
        return [(scope, GroupBytes(size, size, window)) for scope, window, size in sizes]

    @cached_property
    def backward(self) -> tuple[int, int]:
        """What its backward takes at the most, and what it leaves, above what is held when it begins."""
        return self.walk()

    def walk(self, staying: Collection[str] = ()) -> tuple[int, int]:
        """The same where groups of the parts `staying` are on the device, and free when their backward is done."""
        live = most = late = 0
        came: set[str] = set()
        for part in reversed(self.layer.parts):
            own = [item for item in self.placed if item.part == part.name]
            for scope in {item.scope for item in own if item.home == "recompute"} - came:
                came.add(scope)
                live += sum(self.size(i) for i in self.placed if i.home == "recompute" and i.scope == scope)
            restored = sum(self.size(item) for item in own if item.home == "stash")
            most = max(most, live + self._work(part) + restored + self.stream)
            freed = {"recompute"} if part.name in self.graphed else {"keep", "recompute"}
            if part.name in staying:
                freed.add("offload")
            free = sum(self.size(item) for item in own if item.home in freed)
            if self.delayed and part.products:
                late += free + self._waiting(part)
                free = -self._waiting(part)
            live -= free
        return most, live - late


Stages = Mapping[int, Sequence[LayerMemory]]
"""Layers of one rank, by stage."""


def rank_peak(
    plan: Plan,
    stages: Stages,
    pool: PoolConfig,
    static: Mapping[str, int],
    *,
    margin: Margin = "window",
    follows: bool,
    overlaps: bool = False,
) -> RankPeak:
    """The peak of the rank that runs `plan` on its `stages`.

    `follows`: the keeper knows the schedule. `overlaps`: beside a backward runs the forward of another microbatch,
    layer by layer: what one layer has saved is there before the other layer's is free.
    """
    layers = [layer for own in stages.values() for layer in own]

    def by_stage(size: Callable[[LayerMemory], int]) -> dict[int, int]:
        return {stage: sum(map(size, own)) for stage, own in stages.items()}

    kept, stash = by_stage(lambda own: own.kept), by_stage(lambda own: own.stashed)
    moved = by_stage(lambda own: sum(size.device_bytes for _, size in own.groups))
    work = {stage: _work(own, margin) for stage, own in stages.items()}
    beside = max((layer.beside for layer in layers), default=0) if overlaps else 0
    largest = max((size.device_bytes for layer in layers for _, size in layer.groups), default=0)
    at_once = immediate_backwards(plan) if follows and margin == "window" else frozenset()
    resident = _resident_bytes(plan, stages, at_once, margin) if largest else 0
    best = {"kept": 0, "offloaded": 0, "at work": 0}
    host = pages = 0
    for stage, counts, waiting in _moments(plan, at_once):
        pages = max(pages, _held(counts, stash))
        total, stay = _held(counts, moved), _held(waiting, moved)
        # The group in use is one of the window's; where it is one that stays, the window has one fewer.
        here = min(total, stay + (max(0, resident - largest) if stay else resident))
        host = max(host, total - here)
        at_work = work[stage] + beside if stage is not None else 0
        found = {"kept": _held(counts, kept), "offloaded": here, "at work": at_work}
        if sum(found.values()) > sum(best.values()):
            best = found
    best["pool"] = pool_bytes(pages, pool) if pages else 0
    if buffers := max((layer.graph_buffers for layer in layers), default=0):
        best["graphs"] = buffers
    return RankPeak(groups={**static, **best}, host=host)


def pool_bytes(stashed: int, pool: PoolConfig) -> int:
    """Bytes of a pool for so many stashed bytes at one time."""
    return int(pool.headroom * stashed) if pool.device_bytes is None else pool.device_bytes


def _held(counts: Mapping[int, int], sizes: Mapping[int, int]) -> int:
    return sum(count * sizes[stage] for stage, count in counts.items())


def _work(layers: Sequence[LayerMemory], margin: Margin) -> int:
    """The most that backward of a stage takes above what is held when it begins.

    With the margin `last` the last group of each name is on the device, and free after its backward; groups of
    a window make room for others.
    """
    most = above = 0
    waiting = {item.part for layer in layers for item in layer.placed if item.home == "offload"}
    for layer in reversed(layers):
        here = waiting.intersection(item.part for item in layer.placed if item.home == "offload")
        peak, left = layer.walk(here) if here and margin == "last" else layer.backward
        waiting -= here
        most = max(most, above + peak)
        above += left
    return most


@lru_cache(maxsize=256)
def _moments(plan: Plan, at_once: frozenset[Key]) -> list[tuple[int | None, dict[int, int], dict[int, int]]]:
    """The distinct states of the plan: the stage whose backward begins (None: none), and the microbatches held.

    The last of the three counts those whose backward comes at once, which stay on the device.
    """
    counts, waiting = dict.fromkeys(plan.stages, 0), dict.fromkeys(plan.stages, 0)
    seen: set[tuple[object, ...]] = set()
    found = []
    for kind, stage, microbatch in plan.actions:
        stays = (stage, microbatch) in at_once
        if kind == "F":
            counts[stage] += 1
            waiting[stage] += stays
        state = (None if kind == "F" else stage, *counts.values(), *waiting.values())
        if state not in seen:
            seen.add(state)
            found.append((None if kind == "F" else stage, dict(counts), dict(waiting)))
        if kind in ("B", "W"):
            counts[stage] -= 1
            waiting[stage] -= stays
    return found


def _resident_bytes(plan: Plan, stages: Stages, at_once: Collection[Key], margin: Margin) -> int:
    """Most device bytes of offloaded groups that stay, leave or come back, beside those of `at_once`.

    By the keeper's own plan for this schedule, or the last group of each name.
    """
    groups_of = {stage: [own for layer in layers for own in layer.groups] for stage, layers in stages.items()}
    if margin == "last":
        names = {name: size for own in groups_of.values() for name, size in own}
        return sum(size.device_bytes for size in names.values())
    groups: dict[Key, GroupBytes] = {}
    events: list[Event] = []
    most = HELD_PATTERN * len(groups_of) * max(1, max(sum(counts.values()) for counts in plan.held()))
    for kind, stage, microbatch in plan.actions:
        if microbatch >= most or (stage, microbatch) in at_once:
            continue
        keys = [(stage, microbatch, name, at) for at, (name, _) in enumerate(groups_of[stage])]
        if kind == "F":
            groups |= dict(zip(keys, (size for _, size in groups_of[stage])))
            events += [("put", key) for key in keys]
        elif kind in ("B", "I"):
            events += [("get", key) for key in reversed(keys)]
    return make_plan(events, groups).resident_peak_bytes


# --- weights, gradients, optimizer ---


def parameters_of(layers: Sequence[Layer]) -> tuple[int, int]:
    """Parameters that tensor parallel ranks' groups hold, and those of experts, on one rank."""
    parts = [part for layer in layers for part in layer.parts]
    return (
        sum(part.parameters for part in parts if not part.expert),
        sum(part.parameters for part in parts if part.expert),
    )


def static_bytes(layers: Sequence[Layer], layout: Layout, each: ParameterBytes) -> dict[str, int]:
    """Weights, gradients and optimizer state of these layers on one rank.

    Data parallel ranks share the optimizer's state from ZeRO 1 on, gradients from 2, weights from 3. What they
    share of weights and gradients is whole for a while (`gathered`): with ZeRO 3 the weights of the layer at work
    and of the next one, from ZeRO 2 on the gradients of one layer, until they are reduced.
    """
    dense, expert = parameters_of(layers)
    shared = dense / layout.dense_group + expert / layout.expert_group
    own = {zero: dense + expert if layout.zero < zero else shared for zero in (1, 2, 3)}
    found = {
        "weights": round(each.weight * own[3]),
        "gradients": round(each.gradient * own[2]),
        "optimizer": round(each.optimizer * own[1]),
    }
    if layout.zero >= 2 and layout.stage_ranks > 1:
        most = max((layer.parameters for layer in layers), default=0)
        found["gathered"] = round(most * (each.gradient + (2 * each.weight if layout.zero == 3 else 0.0)))
    return found
