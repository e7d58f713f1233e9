"""Homes for the layers of a pipeline rank, for a budget of memory.

Homes of Megatron-LM and torchtitan are the same for all layers and ranks, as their flags are: each of a list is
costed, and the fastest that fits is taken.

Ours are mixed, rank by rank. A *choice* gives regions of a layer their homes; every layer of a rank has one. With
one bound on memory, the fastest mix of choices is one of two neighbours on the lower hull of seconds over bytes: a
rank takes the cheaper choice of the two for as many layers as fit. A choice costs, for one microbatch of a rank,

    recomputed seconds  +  moved bytes / memory rate, each way  +  max(0, moved bytes / link rate − compute seconds)

All of this proposes. The mix is checked with the byte formulas, and given more layers of the smaller choice until
every rank fits; the replay gives the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from pagestash.patterns import number_ranges
from pagestash.policy import Policy, PoolConfig, Rule
from pagestash.saved.offload.plan import WINDOW
from pagestash.simulation.costs.build import Known, step_costs
from pagestash.simulation.costs.costs import LayerCosts, RankCosts, StepCosts
from pagestash.simulation.costs.homes import MegatronHomes, Placed, PolicyHomes
from pagestash.simulation.costs.run import Run
from pagestash.simulation.model.parts import Layer

Allowed = Literal["recompute", "offload"]
BOTH: tuple[Allowed, ...] = ("recompute", "offload")
NEAR = 0.02
"""Part of the device's memory: what is estimated to be over by less is computed."""

LayerHomes = tuple[tuple[str, Allowed], ...]
_NORMS: LayerHomes = (("attn_norm", "recompute"), ("mlp_norm", "recompute"))
_EXPERTS: LayerHomes = (("moe.expert_fc1", "offload"), ("moe.moe_act", "offload"))
_ATTENTION: LayerHomes = (("attn.core_attn", "offload"),)

CHOICES: tuple[LayerHomes, ...] = (
    (),
    _NORMS,
    (("moe.moe_act", "offload"),),
    _EXPERTS,
    (*_EXPERTS, *_ATTENTION),
    (*_NORMS, ("moe.moe_act", "offload")),
    (*_NORMS, *_EXPERTS),
    (*_NORMS, *_EXPERTS, *_ATTENTION),
    (*_NORMS, ("attn.qkv_linear", "recompute")),
    (*_NORMS, ("attn.qkv_linear", "recompute"), ("moe.moe_act", "recompute")),
    (*_NORMS, ("attn.qkv_linear", "recompute"), *_EXPERTS),
    (("", "recompute"),),
    (("moe.expert_fc1", "offload"), ("", "recompute")),
)
"""Regions of a layer ("" is the layer) and their homes; what is not named is kept."""


class ChosenHomes:
    """A choice for each layer; says the same as the ranks' policies together, and is asked faster."""

    def __init__(self, chosen: Mapping[str, LayerHomes]) -> None:
        self._chosen = chosen
        self._homes = {choice: PolicyHomes(_uniform(choice)) for choice in {(), *chosen.values()}}

    @property
    def pool(self) -> PoolConfig:
        return PoolConfig()

    def choice(self, layer: str) -> LayerHomes:
        """Of a layer by its name."""
        return self._chosen.get(layer, ())

    def place(self, layer: Layer) -> list[Placed]:
        return self._homes[self.choice(layer.name)].place(layer)


def _uniform(choice: LayerHomes) -> Policy:
    return Policy([_rule("layers.*", *item) for item in choice])


@dataclass(frozen=True, slots=True)
class _Point:
    """What a rank takes if all its layers have one choice."""

    choice: LayerHomes
    device_bytes: int
    host_bytes: int
    seconds: float
    """More than without a policy, for one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run with homes that fit, or the nearest to it."""

    run: Run
    costs: StepCosts
    policies: tuple[Policy, ...]
    """Of each pipeline rank."""
    lacks_bytes: int
    """What the fullest rank has too little; 0 if all fit."""
    host_lacks_bytes: int


def choices_of(run: Run, allowed: Sequence[Allowed] = BOTH) -> list[LayerHomes]:
    """The choices whose homes are allowed, and whose regions the model has."""
    mla = run.config.attention == "mla"
    found = [
        choice
        for choice in CHOICES
        if all(home in allowed for _, home in choice)
        and (mla or not any("qkv" in name for name, _ in choice))
    ]
    return list(dict.fromkeys(found))


class HomePlanner:
    """Plans homes of one run for several budgets."""

    def __init__(self, run: Run, allowed: Sequence[Allowed] = BOTH) -> None:
        self.run, self.allowed = run, allowed
        self._known = Known(run)
        self.plain = step_costs(replace(run, homes=PolicyHomes(Policy())), self._known)
        self._layers = [layers_of_rank(rank) for rank in self.plain.ranks]

    def limit(self, allowed: Sequence[Allowed]) -> "HomePlanner":
        """The same planner with fewer homes; what it knows of layers and ranks is shared."""
        choices = choices_of(self.run, allowed)
        found = copy(self)
        found.allowed = allowed
        found._points = [  # noqa: SLF001 -- a copy of this one
            [point for point in own if point.choice in choices] for own in self._points
        ]
        return found

    @cached_property
    def _points(self) -> list[list[_Point]]:
        kinds = {choice: layer_kinds(self.run, choice) for choice in choices_of(self.run, self.allowed)}
        return [_points(self.run, self.plain, rank, kinds) for rank in self.plain.ranks]

    @property
    def mixes(self) -> bool:
        """Whether layers may have several homes, of which some may be left out."""
        return self.run.framework.name == "pagestash" and len(self.allowed) > 1

    @property
    def most_bytes(self) -> int:
        """What the fullest rank takes without a policy."""
        return max(rank.device_bytes for rank in self.plain.ranks)

    @property
    def least_bytes(self) -> int:
        """What the fullest rank takes at least, as estimated."""
        return max(min(point.device_bytes for point in own) for own in self._points)

    def plan(self, room: int) -> Planned:
        """Homes for `room` bytes of every device."""
        run, layers, host = self.run, self._layers, self.run.cluster.host_bytes_a_device
        none = [Policy() for _ in layers]
        if self.most_bytes <= room:
            return _made(run, self.plain, none, room, host)
        if run.framework.name != "pagestash":
            return self._uniform(room)
        short = self.least_bytes - room
        if short > NEAR * room:  # nothing fits
            made = _made(run, self.plain, none, room, host)
            return replace(made, lacks_bytes=short)
        points = self._points
        pairs = [_pair(own, room, host) for own in points]
        counts = [_count(pair, len(own), room) for pair, own in zip(pairs, layers)]
        while True:
            homes = ChosenHomes(_chosen(layers, pairs, counts))
            costs = step_costs(replace(run, homes=homes), self._known)
            before = list(counts)
            for at, rank in enumerate(costs.ranks):
                if rank.device_bytes <= room:
                    continue
                if counts[at] < len(layers[at]):
                    counts[at] += _more(pairs[at], len(layers[at]) - counts[at], len(layers[at]), rank, room)
                elif smaller := [p for p in points[at] if p.device_bytes < pairs[at][1].device_bytes]:
                    # The estimate was too low: on to the next smaller choice.
                    pairs[at] = pairs[at][1], max(smaller, key=lambda point: point.device_bytes)
                    counts[at] = 1
            if counts == before:
                break
        policies = [
            _policy(own, pair, count, run.config.dense_layers)
            for own, pair, count in zip(layers, pairs, counts)
        ]
        made = _made(run, costs, policies, room, host)
        return replace(made, run=replace(run, homes=homes))

    def _uniform(self, room: int) -> Planned:
        """The fastest that fits of homes which are the same for all layers, as launch flags have them."""
        host = self.run.cluster.host_bytes_a_device
        best: tuple[tuple[int, float], Planned] | None = None
        for homes in uniform_homes(self.run, self.allowed):
            run = replace(self.run, homes=homes)
            costs = step_costs(run, self._known)
            made = replace(_made(run, costs, (), room, host), run=run)
            layers = ([layer for stage in rank.stages for layer in stage.layers] for rank in costs.ranks)
            slowest = max(_seconds(costs, own) for own in layers)
            score = made.lacks_bytes + made.host_lacks_bytes, slowest
            if best is None or score < best[0]:
                best = score, made
        assert best is not None
        return best[1]


def uniform_homes(run: Run, allowed: Sequence[Allowed]) -> Iterator[MegatronHomes]:
    """Homes that the flags of Megatron-LM can say, or torchtitan's, which has recompute of whole layers alone."""
    config, both = run.config, len(allowed) > 1
    yield MegatronHomes()
    if run.framework.name == "megatron":
        recompute = [("layernorm",), ("layernorm", "moe_act")]
        if config.attention == "mla":
            recompute += [
                ("mla_up_proj",),
                ("layernorm", "mla_up_proj"),
                ("layernorm", "mla_up_proj", "moe_act"),
            ]
        if config.shared_experts:
            recompute.append((*recompute[-1], "shared_experts"))
        recompute.append((*recompute[0], "moe"))
        offload = [("moe_act",), ("expert_fc1", "moe_act"), ("core_attn", "expert_fc1", "moe_act")]
        if "recompute" in allowed:
            yield from (MegatronHomes(recompute=names) for names in recompute)
        if "offload" in allowed:
            yield from (MegatronHomes(offload=names) for names in offload)
        if both:
            light = [names for names in recompute if "moe_act" not in names and "moe" not in names]
            yield from (
                MegatronHomes(recompute=again, offload=moved) for again, moved in product(light, offload)
            )
    if "recompute" in allowed:
        yield MegatronHomes(full=True)


def layer_costs(run: Run, choice: LayerHomes = ()) -> StepCosts:
    """One device's step of the embedding, a dense layer if there is one, one with experts, and the head."""
    config, layout = run.config, replace(run.layout, pp=1, vpp=1, schedule="1F1B")
    dense = min(1, config.dense_layers)
    one = replace(
        run,
        config=replace(config, layers=dense + 1, dense_layers=dense, mtp_layers=0),
        layout=layout,
        global_batch=layout.dp * run.microbatch,
        placement=None,
        homes=PolicyHomes(_uniform(choice)),
    )
    return step_costs(one)


def layer_kinds(run: Run, choice: LayerHomes = ()) -> Mapping[str, LayerCosts]:
    """The costs of the embedding, a dense layer, one with experts, and the head: layers of a kind are alike."""
    (stage,) = layer_costs(run, choice).stages
    embedding, *blocks, head = stage.layers
    return {"embed": embedding, "dense": blocks[0], "moe": blocks[-1], "head": head}


def kind_of(name: str, dense: int) -> str:
    """The kind of a layer by its name; the first `dense` ones have no experts."""
    if not name.startswith("layers."):
        return name
    return "dense" if int(name.removeprefix("layers.")) < dense else "moe"


def joined(policies: Sequence[Policy]) -> Policy:
    """The rules of all ranks: each names layers of its own."""
    return Policy([rule for policy in policies for rule in policy.rules])


def _made(run: Run, costs: StepCosts, policies: Sequence[Policy], room: int, host: int) -> Planned:
    return Planned(
        run=replace(run, homes=PolicyHomes(joined(policies))),
        costs=costs,
        policies=tuple(policies),
        lacks_bytes=max(0, max(rank.device_bytes for rank in costs.ranks) - room),
        host_lacks_bytes=max(0, max(rank.host_bytes for rank in costs.ranks) - host),
    )


def layers_of_rank(rank: RankCosts) -> list[int]:
    """The numbers of its layers."""
    names = (layer.name for stage in rank.stages for layer in stage.layers)
    return [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]


def _points(
    run: Run, plain: StepCosts, rank: RankCosts, kinds: Mapping[LayerHomes, Mapping[str, LayerCosts]]
) -> list[_Point]:
    """What each choice takes of a rank, at the moment when it holds most."""
    dense = run.config.dense_layers
    names = {stage.stage: [kind_of(layer.name, dense) for layer in stage.layers] for stage in rank.stages}
    held = {stage.stage: stage.kept_bytes.at() for stage in rank.stages}
    counts = max(rank.plan.held(), key=lambda now: sum(count * held[at] for at, count in now.items()))
    found = []
    for choice, own in kinds.items():
        # Every (stage's layer, microbatch in flight), and every layer once.
        live = [(own[kind], kinds[()][kind], counts[at]) for at, layers in names.items() for kind in layers]
        moved = sum(layer.moved_bytes.at() * count for layer, _, count in live)
        window = min(moved, WINDOW * max(layer.moved_bytes.at() for layer, _, _ in live))
        kept = sum((layer.kept_bytes.at() - old.kept_bytes.at()) * count for layer, old, count in live)
        work = max(layer.workspace.at() for layer, _, _ in live) - max(
            old.workspace.at() for _, old, _ in live
        )
        found.append(
            _Point(
                choice,
                int(rank.device_bytes + kept + window + work),
                int(moved - window),
                _seconds(plain, [layer for layer, _, _ in live]),
            )
        )
    return found


def _seconds(costs: StepCosts, layers: Sequence[LayerCosts]) -> float:
    """What homes of these layers add, with waits for copies."""
    again = sum(layer.recompute.at() for layer in layers)
    moved = sum(layer.moved_bytes.at() for layer in layers)
    kinds = ("forward", "backward_input", "backward_weight")
    compute = sum(getattr(layer, kind).at() for layer in layers for kind in kinds)
    link = min(costs.host.both, costs.host.shared_out / costs.host.devices)
    return again + 2 * moved / costs.memory_rate + max(0.0, moved / link - compute - again)


def _pair(points: Sequence[_Point], room: int, host: int) -> tuple[_Point, _Point]:
    """The two choices to mix: one that may be too large, and one that fits; the smallest twice if none does."""
    usable = [point for point in points if point.host_bytes <= host] or list(points)
    small = [point for point in usable if point.device_bytes <= room]
    if not small:
        least = min(usable, key=lambda point: point.device_bytes)
        return least, least
    best, pair = float("inf"), (small[0], small[0])
    for fits in small:
        for large in usable:
            part = 1.0
            if large.device_bytes > room:
                part = (large.device_bytes - room) / (large.device_bytes - fits.device_bytes)
            elif large is not fits:
                continue
            mixed = part * fits.seconds + (1 - part) * large.seconds
            if mixed < best:
                best, pair = mixed, (large, fits)
    return pair


def _count(pair: tuple[_Point, _Point], layers: int, room: int) -> int:
    """So many layers have the smaller choice."""
    large, fits = pair
    if large is fits:
        return layers
    part = (large.device_bytes - room) / (large.device_bytes - fits.device_bytes)
    return min(layers, int(part * layers))


def _more(pair: tuple[_Point, _Point], left: int, layers: int, rank: RankCosts, room: int) -> int:
    """Layers that are to have the smaller choice, too: nearly as many as its estimate says, at least one."""
    each = (pair[0].device_bytes - pair[1].device_bytes) / layers
    most = int(0.7 * (rank.device_bytes - room) / each) if each > 0 else 1
    return max(1, min(left, most))


def _chosen(
    layers: Sequence[Sequence[int]], pairs: Sequence[tuple[_Point, _Point]], counts: Sequence[int]
) -> dict[str, LayerHomes]:
    """The choice of each layer, by name."""
    return {
        f"layers.{number}": (fits if at < count else large).choice
        for own, (large, fits), count in zip(layers, pairs, counts)
        for at, number in enumerate(sorted(own))
    }


def _policy(layers: Sequence[int], pair: tuple[_Point, _Point], count: int, dense: int) -> Policy:
    """The first `count` layers have the smaller choice: their copies have the longest way back."""
    large, fits = pair
    rules: list[Rule] = []
    for numbers, point in ((sorted(layers)[:count], fits), (sorted(layers)[count:], large)):
        for region, home in point.choice:
            own = [number for number in numbers if number >= dense or not region.startswith("moe.")]
            if own:
                rules.append(_rule(f"layers.{{{number_ranges(own)}}}", region, home))
    return Policy(rules)


def _rule(layer: str, region: str, home: Allowed) -> Rule:
    return Rule(f"{layer}.{region}" if region else layer, home)
