"""The peak of a pipeline rank: what it holds for the whole run, what its schedule holds, and the module at work.

    peak = static + max over the plan's actions of ( held + offloaded on the device + at work )

`held` are microbatches in flight times what stays of each, from the schedule's own plan. A backward works from its
last module to its first: before a module, what later modules saved is free again; it has its temporary tensors, the
gradient of the residual stream, and what a replay brings back. With overlap, another microbatch's forward is at
work beside it. What CUDA graphs keep is static: as much as the schedule ever holds at once.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, make_plan
from pagestash.schedules.plan import Plan, immediate_backwards
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.homes import Homes, Placed
from pagestash.simulation.model.framework import Framework, ParameterBytes
from pagestash.simulation.model.parts import Layer, Part

HELD_PATTERN = 4
"""Times the stages: microbatches after which a schedule's pattern of offloads repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """A layer's saved tensors, each with its home."""

    layer: Layer
    placed: tuple[Placed, ...]
    capacity: float = 0.0
    """Rows of static buffers over balanced rows; 0: buffers have the rows that came."""
    skew: float = 1.0
    """Received rows over balanced rows."""
    product_workspace: int = 0
    """Bytes that a product has as its workspace."""
    graphed: frozenset[str] = frozenset()
    """Parts whose tensors belong to CUDA graphs: they are there for the whole run."""
    delayed: int = 0
    """Bytes of an element of gradients that wait, with the inputs of products, for weight gradients at the layer's
    end; 0: weight gradients are computed with the others."""

    def size(self, placed: Placed) -> int:
        """Device bytes of a tensor that is not in pages: static buffers hold their whole capacity."""
        return round(placed.bytes * (self.buffer_rows if placed.routed else 1.0))

    @property
    def buffer_rows(self) -> float:
        """Rows of a buffer over balanced rows."""
        return self.capacity or self.skew

    def valid(self, placed: Placed) -> int:
        """Its valid bytes, which is what leaves the device or goes to pages."""
        return round(placed.bytes * (self.skew if placed.routed else 1.0))

    @property
    def kept(self) -> int:
        return sum(self.size(item) for item in self.placed if item.home == "keep")

    @property
    def beside(self) -> int:
        """What its forward takes beside another layer's backward: what it keeps, and rows that leave and arrive."""
        if not self.layer.dispatch_bytes:
            return 0
        return self.kept - self.graph_bytes + round(2 * self.buffer_rows * self.layer.dispatch_bytes)

    @property
    def graph_bytes(self) -> int:
        """What is kept in CUDA graphs."""
        kept = (item for item in self.placed if item.home == "keep" and item.part in self.graphed)
        return sum(map(self.size, kept))

    @property
    def graph_work(self) -> int:
        """What graphs of its backward work with, beside what they keep."""
        parts = (part for part in self.layer.parts if part.name in self.graphed)
        return max((self._work(part) for part in parts), default=0)

    def _work(self, part: Part) -> int:
        """Temporary bytes of a part's backward."""
        work = part.temporary * (self.buffer_rows if part.routed else 1)
        return round(work) + part.weight_gradient + (self.product_workspace if part.products else 0)

    def _waiting(self, part: Part) -> int:
        """Gradients of a part's products that delayed weight gradients wait with."""
        found = self.delayed * sum(product.groups * product.m * product.n for product in part.products)
        return round(found * (self.buffer_rows if part.routed else 1))

    def bytes_of(self, home: str) -> int:
        """Valid bytes by home."""
        return sum(self.valid(item) for item in self.placed if item.home == home)

    def groups(self) -> Iterator[tuple[str, GroupBytes]]:
        """Offloaded bytes by the region of their rule, in the order of forward."""
        moved = (item for item in self.placed if item.home == "offload")
        for (scope, window), items in groupby(moved, lambda item: (item.scope, item.window)):
            size = sum(map(self.valid, items))
            name = f"{self.layer.name}.{scope}" if scope else self.layer.name
            yield name, GroupBytes(size, size, window)

    def walk(self, stream: int, above: int = 0, staying: Collection[str] = ()) -> tuple[int, int]:
        """Backward through the layer, from `above` bytes over what is held: the most, and what is left.

        `staying` are parts whose offloaded group is on the device, and free when their backward is done.
        """
        live = most = above
        late = 0
        came: set[str] = set()
        for part in reversed(self.layer.parts):
            own = [item for item in self.placed if item.part == part.name]
            for scope in {item.scope for item in own if item.home == "recompute"} - came:
                came.add(scope)
                live += sum(self.size(i) for i in self.placed if i.home == "recompute" and i.scope == scope)
            restored = sum(self.size(item) for item in own if item.home == "stash")
            most = max(most, live + self._work(part) + restored + stream)
            freed = {"recompute"} if part.name in self.graphed else {"keep", "recompute"}
            if part.name in staying:
                freed.add("offload")
            free = sum(self.size(item) for item in own if item.home in freed)
            if self.delayed and part.products:
                late += free + self._waiting(part)
                free = -self._waiting(part)
            live -= free
        return most, live - late


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Consecutive layers of one rank."""

    stage: int
    layers: tuple[LayerMemory, ...]
    stream: int

    @property
    def kept(self) -> int:
        """What stays between forward and backward, but for what belongs to CUDA graphs."""
        return sum(layer.kept - layer.graph_bytes for layer in self.layers)

    @property
    def graph_bytes(self) -> int:
        return sum(layer.graph_bytes for layer in self.layers)

    def bytes_of(self, home: str) -> int:
        return sum(layer.bytes_of(home) for layer in self.layers)

    def work(self, margin: str) -> int:
        """The most that its backward takes above what is held when it begins.

        With the margin `last` the last group of each name is on the device, and free after its backward; groups of
        a window make room for others.
        """
        most = above = 0
        waiting = {item.part for layer in self.layers for item in layer.placed if item.home == "offload"}
        for layer in reversed(self.layers):
            here = {item.part for item in layer.placed if item.home == "offload"}
            peak, above = layer.walk(self.stream, above, here & waiting if margin == "last" else ())
            waiting -= here
            most = max(most, peak)
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """The peak of one rank, by what holds it."""

    groups: Mapping[str, int]
    host: int
    """The most that is on the host at one time."""
    pool: int
    """Bytes of device pages, headroom included."""
    leaving: float = 0.0
    """Bytes of a microbatch that leave for the host, on average."""

    @property
    def total(self) -> int:
        return sum(self.groups.values())


def static_bytes(layers: Sequence[Layer], layout: Layout, each: ParameterBytes) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state of these layers on one rank.

    Data parallel ranks share the optimizer's state from ZeRO 1 on, gradients from 2, weights from 3.
    """
    dense = sum(part.parameters for layer in layers for part in layer.parts if not part.expert)
    expert = sum(part.parameters for layer in layers for part in layer.parts if part.expert)

    def share(size: float, zero: int) -> int:
        if layout.zero < zero:
            return round(size * (dense + expert))
        return round(size * (dense / layout.dense_group + expert / layout.expert_group))

    return share(each.weight, 3), share(each.gradient, 2), share(each.optimizer, 1)


def gathered_bytes(layers: Sequence[Layer], layout: Layout, each: ParameterBytes) -> int:
    """What a rank holds of weights and gradients that it shares, for a while: FSDP2's and ZeRO's copies.

    With ZeRO 3 the weights of the layer at work and of the next one are whole; from ZeRO 2 on, so are the gradients
    of one layer, until they are reduced.
    """
    most = max((layer.parameters for layer in layers), default=0)
    weights = 2 * each.weight if layout.zero == 3 and layout.stage_ranks > 1 else 0.0
    gradients = each.gradient if layout.zero >= 2 and layout.stage_ranks > 1 else 0.0
    return round(most * (weights + gradients))


def step_bytes(layers: Sequence[Layer], layout: Layout, each: ParameterBytes) -> int:
    """Temporary bytes of the optimizer's step."""
    return static_bytes(layers, layout, ParameterBytes(weight=0, gradient=0, optimizer=each.step))[2]


def pool_bytes(stashed: float, headroom: float) -> int:
    """Bytes of a pool for so many stashed bytes at one time."""
    return int(headroom * stashed)


def rank_peak(
    plan: Plan,
    stages: Sequence[StageMemory],
    homes: Homes,
    framework: Framework,
    static: Mapping[str, int],
    *,
    follows: bool,
    overlaps: bool = False,
    step: int = 0,
) -> RankPeak:
    """The peak of the rank that runs `plan` on its `stages`.

    `follows`: the keeper knows the schedule. `overlaps`: beside a backward runs the forward of another microbatch,
    layer by layer: what one layer has saved is there before the other layer's is free. `step` are temporary bytes
    of the optimizer's step, which comes when no activations are left.
    """
    by_number = {stage.stage: stage for stage in stages}
    kept = {number: stage.kept for number, stage in by_number.items()}
    graphed = {number: stage.graph_bytes for number, stage in by_number.items()}
    work = {number: stage.work(framework.margin) for number, stage in by_number.items()}
    beside = max((layer.beside for stage in stages for layer in stage.layers), default=0) if overlaps else 0
    stash = {number: stage.bytes_of("stash") for number, stage in by_number.items()}
    offload = _Offloaded.of(plan, stages, framework, follows)
    pages = max(sum(count * stash[stage] for stage, count in counts.items()) for counts in plan.held())
    fixed = homes.pool.device_bytes
    pool = 0 if not pages else pool_bytes(pages, homes.pool.headroom) if fixed is None else fixed
    best = {"kept": 0, "offloaded": 0, "at work": step}
    host = 0
    graphs = 0
    for stage, counts, waiting in _moments(plan, offload):
        held = sum(count * kept[number] for number, count in counts.items())
        graphs = max(graphs, sum(count * graphed[number] for number, count in counts.items()))
        here, away = offload.at(counts, waiting)
        host = max(host, away)
        at_work = work[stage] + beside if stage is not None else 0
        found = {"kept": held, "offloaded": here, "at work": at_work}
        if sum(found.values()) > sum(best.values()):
            best = found
    if graphs:
        best["graphs"] = graphs + _graph_buffers(stages, overlaps)
    return RankPeak(groups={**static, "pool": pool, **best}, host=host, pool=pool, leaving=offload.leaving)


def _graph_buffers(stages: Sequence[StageMemory], overlaps: bool) -> int:
    """What CUDA graphs have beside what they keep: a pool of their own for temporary tensors, static gradients.

    Buffers are used again by other microbatches and layers, so that there are as many as are in flight at once;
    with overlap one layer's more.
    """
    layers = [layer for stage in stages for layer in stage.layers]
    more = max(layer.graph_bytes for layer in layers) if overlaps else 0
    return more + max(layer.graph_work for layer in layers) + 2 * max(stage.stream for stage in stages)


def _moments(
    plan: Plan, offload: "_Offloaded"
) -> Iterator[tuple[int | None, dict[int, int], dict[int, int]]]:
    """The distinct states of the plan: the stage whose backward begins (None: none), and the microbatches held.

    The last of the three counts those whose backward comes at once, which stay on the device.
    """
    counts, waiting = dict.fromkeys(plan.stages, 0), dict.fromkeys(plan.stages, 0)
    seen: set[tuple[object, ...]] = set()
    for kind, stage, microbatch in plan.actions:
        at_once = (stage, microbatch) in offload.at_once
        if kind == "F":
            counts[stage] += 1
            waiting[stage] += at_once
        state = (None if kind == "F" else stage, *counts.values(), *waiting.values())
        if state not in seen:
            seen.add(state)
            yield None if kind == "F" else stage, dict(counts), dict(waiting)
        if kind in ("B", "W"):
            counts[stage] -= 1
            waiting[stage] -= at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offloaded:
    """What of the offloaded groups is on the device."""

    bytes: Mapping[int, int]
    """Of one microbatch, by stage."""
    at_once: frozenset[Key]
    limit: int
    """Most bytes of groups that stay, leave or come back, beside those of `at_once`."""
    largest: int
    leaving: float = 0.0
    """Bytes of a microbatch that leave, on average."""

    @classmethod
    def of(
        cls, plan: Plan, stages: Sequence[StageMemory], framework: Framework, follows: bool
    ) -> "_Offloaded":
        groups = {stage.stage: [g for layer in stage.layers for g in layer.groups()] for stage in stages}
        sizes = {number: sum(size.device_bytes for _, size in own) for number, own in groups.items()}
        largest = max((size.device_bytes for own in groups.values() for _, size in own), default=0)
        if framework.margin == "last":
            names = {name.split(".", 2)[-1]: size for own in groups.values() for name, size in own}
            limit = sum(size.device_bytes for size in names.values())
            return cls(bytes=sizes, at_once=frozenset(), limit=limit, largest=largest)
        at_once = immediate_backwards(plan) if follows else frozenset()
        made = _offload_plan(plan, groups, at_once) if largest else OffloadPlan({})
        staying = made.stays - {key for key in made.stays if key[:2] in at_once}
        leaving = sum(size.host_bytes for key, size in made.groups.items() if key not in made.stays)
        microbatches = len({key[1] for key in made.groups})
        return cls(
            bytes=sizes,
            at_once=at_once,
            limit=_most_alive(made, staying),
            largest=largest,
            leaving=leaving / max(1, microbatches),
        )

    def at(self, counts: Mapping[int, int], waiting: Mapping[int, int]) -> tuple[int, int]:
        """Offloaded bytes on the device and on the host."""
        total = sum(count * self.bytes[stage] for stage, count in counts.items())
        stay = sum(count * self.bytes[stage] for stage, count in waiting.items())
        # The group in use is one of the window's; where it is one that stays, the window has one fewer.
        room = self.limit if not stay else max(0, self.limit - self.largest)
        here = min(total, stay + room)
        return here, total - here


def _offload_plan(
    plan: Plan, groups_of: Mapping[int, Sequence[tuple[str, GroupBytes]]], at_once: frozenset[Key]
) -> OffloadPlan:
    """The keeper's own plan for the puts and gets of this schedule; `groups_of` are those of each stage."""
    groups: dict[Key, GroupBytes] = {}
    events: list[Event] = []
    most = HELD_PATTERN * len(groups_of) * max(1, max(sum(counts.values()) for counts in plan.held()))
    for kind, stage, microbatch in plan.actions:
        if microbatch >= most:
            continue
        if kind == "F":
            for name, size in groups_of[stage]:
                key = (stage, microbatch, name, 0)
                groups[key] = size
                events.append(("put", key))
        elif kind in ("B", "I"):
            events += [("get", (stage, microbatch, name, 0)) for name, _ in reversed(groups_of[stage])]
    return make_plan(events, groups, at_once)


def _most_alive(made: OffloadPlan, staying: frozenset[Key]) -> int:
    """Most bytes of groups that stay; the window, where one leaves and another comes back at once."""
    now = most = 0
    for index, (kind, key) in enumerate(made.order):
        size = made.groups[key].device_bytes
        if key not in made.stays:
            if kind == "put" and index + 1 < len(made.order) and made.order[index + 1][0] == "get":
                return made.window_of(key)
        elif key in staying:
            now += size if kind == "put" else -size
            most = max(most, now)
    return most
