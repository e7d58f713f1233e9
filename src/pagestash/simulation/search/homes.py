"""Homes that fit the memory of a run, and are as fast as can be.

A *choice* gives regions of a layer their homes. Every choice is costed as if all layers had it. Megatron-LM and
torchtitan have the same homes in all layers, as their flags do: they get the fastest choice that fits.

Ours are mixed, rank by rank. With one bound on memory, the fastest mix of choices is one of two neighbours on the
lower hull of seconds over bytes: a rank has the smaller choice of the two in as few of its first layers as fit,
whose copies have the longest way back. A choice costs, for one microbatch of a rank,

    recomputed seconds  +  moved bytes / memory rate, each way  +  max(0, moved bytes / link rate − compute seconds)

The replay gives the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

from pagestash.patterns import number_ranges
from pagestash.policy import Policy, Rule
from pagestash.simulation.costs.build import Known, step_costs
from pagestash.simulation.costs.costs import RankCosts, StepCosts
from pagestash.simulation.model.homes import Homes, MegatronHomes, Placed, PolicyHomes
from pagestash.simulation.model.parts import Layer
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.played import Replay

Choice = tuple[tuple[str, Literal["recompute", "offload"]], ...]
"""Regions of a layer ("" is the layer) and their homes; what is not named is kept."""
_NORMS: Choice = (("attn_norm", "recompute"), ("mlp_norm", "recompute"))
_EXPERTS: Choice = (("moe.expert_fc1", "offload"), ("moe.moe_act", "offload"))
_ATTENTION: Choice = (("attn.core_attn", "offload"),)
_PROJECTIONS: Choice = (*_NORMS, ("attn.qkv_linear", "recompute"))
CHOICES: tuple[Choice, ...] = (
    (),
    _NORMS,
    (("moe.moe_act", "offload"),),
    _EXPERTS,
    (*_EXPERTS, *_ATTENTION),
    (*_NORMS, ("moe.moe_act", "offload")),
    (*_NORMS, *_EXPERTS),
    (*_NORMS, *_EXPERTS, *_ATTENTION),
    _PROJECTIONS,
    (*_PROJECTIONS, ("moe.moe_act", "recompute")),
    (*_PROJECTIONS, *_EXPERTS),
    (("", "recompute"),),
    (("moe.expert_fc1", "offload"), ("", "recompute")),
)
SMALLEST = 2
"""So many of the last ones keep least: where they do not fit, none does."""


class ChosenHomes(Homes):
    """A choice for each layer; says the same as the ranks' policies together, and is asked faster."""

    def __init__(self, chosen: Mapping[str, Choice]) -> None:
        self.chosen = chosen
        self._found: dict[tuple[int, Choice], tuple[Layer, tuple[Placed, ...]]] = {}

    def place(self, layer: Layer) -> tuple[Placed, ...]:
        choice = self.chosen.get(layer.name, ())
        key = id(layer.parts), choice  # alike for layers with the same parts, which are kept with the answer
        if key not in self._found:
            self._found[key] = layer, PolicyHomes(_policy("layers.*", choice)).place(layer)
        return self._found[key][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run with homes that fit, replayed; or the nearest to it."""

    run: Run
    costs: StepCosts
    bound: float = 0.0
    """Seconds, if memory were no matter."""
    played: Replay | None = None
    seconds: float = float("inf")

    @property
    def lacks_bytes(self) -> int:
        """What the fullest rank has too little; 0 if all fit."""
        return max(0, max(rank.device_bytes for rank in self.costs.ranks) - self.run.room)

    @property
    def host_lacks_bytes(self) -> int:
        most = max(rank.peak.host for rank in self.costs.ranks)
        return max(0, most - self.run.cluster.host_bytes_a_device)

    @property
    def lacks(self) -> int:
        return self.lacks_bytes + self.host_lacks_bytes

    @property
    def policies(self) -> list[Policy]:
        """Of each pipeline rank, if each has one of its own."""
        if not isinstance(self.run.homes, ChosenHomes):
            return []
        chosen, dense = self.run.homes.chosen, self.run.config.dense_layers
        return [_rank_policy(rank.layer_names, chosen, dense) for rank in self.costs.ranks]


def plan_homes(run: Run) -> list[Planned]:
    """The homes that look fastest, to be replayed; the nearest to it if none fits.

    Ours are also planned without offload, of whose waits the estimate is rough.
    """
    known = Known(run)
    mixes = run.framework.name == "pagestash"
    plain = _planned(run, ChosenHomes({}) if mixes else MegatronHomes(), known)
    if not plain.lacks:
        return [plain]
    if not mixes:
        options = [_planned(run, homes, known) for homes in uniform_homes(run)]
        return [
            min(options, key=lambda own: (own.lacks, max(_seconds(own.costs, r) for r in own.costs.ranks)))
        ]
    layers = [rank.layer_names for rank in plain.costs.ranks]
    tried: dict[Choice, Planned] = {}
    for choice in reversed(choices_of(run)):
        everywhere = ChosenHomes({name: choice for own in layers for name in own})
        tried[choice] = _planned(run, everywhere, known)
        if len(tried) == SMALLEST and all(own.lacks for own in tried.values()):
            return [*tried.values()]
    made = _mixed(run, layers, tried, known)
    if not any(rank.peak.groups["offloaded"] for rank in made.costs.ranks):
        return [made]
    recomputed = {
        choice: own for choice, own in tried.items() if all(home != "offload" for _, home in choice)
    }
    return [made, _mixed(run, layers, recomputed, known)]


def _planned(run: Run, homes: Homes, known: Known) -> Planned:
    made = replace(run, homes=homes)
    return Planned(run=made, costs=step_costs(made, known))


def choices_of(run: Run) -> list[Choice]:
    """The choices whose regions the model has."""
    latent = run.config.attention == "mla"
    return [own for own in CHOICES if latent or not any("qkv" in region for region, _ in own)]


def uniform_homes(run: Run) -> Iterator[MegatronHomes]:
    """Homes that the flags of Megatron-LM can say, or torchtitan's, which has recompute of whole layers alone."""
    yield MegatronHomes()
    if run.framework.name == "megatron":
        recompute = [("layernorm",), ("layernorm", "moe_act")]
        if run.config.attention == "mla":
            recompute += [
                ("mla_up_proj",),
                ("layernorm", "mla_up_proj"),
                ("layernorm", "mla_up_proj", "moe_act"),
            ]
        if run.config.shared_experts:
            recompute.append((*recompute[-1], "shared_experts"))
        recompute.append((*recompute[0], "moe"))
        offload = [("moe_act",), ("expert_fc1", "moe_act"), ("core_attn", "expert_fc1", "moe_act")]
        light = [names for names in recompute if "moe_act" not in names and "moe" not in names]
        yield from (MegatronHomes(recompute=names) for names in recompute)
        yield from (MegatronHomes(offload=names) for names in offload)
        yield from (MegatronHomes(recompute=a, offload=b) for a, b in product(light, offload))
    yield MegatronHomes(full=True)


class _Point(NamedTuple):
    """What a rank takes if all its layers have one choice."""

    choice: Choice
    rank: RankCosts
    seconds: float
    """More than without a policy, for one microbatch."""


def _mixed(
    run: Run, layers: Sequence[Sequence[str]], tried: Mapping[Choice, Planned], known: Known
) -> Planned:
    """Every rank with two choices, the smaller one in as few layers as fit."""
    pairs = []
    for at in range(len(layers)):
        ranks = ((choice, own.costs, own.costs.ranks[at]) for choice, own in tried.items())
        pairs.append(
            _pair([_Point(choice, rank, _seconds(costs, rank)) for choice, costs, rank in ranks], run)
        )
    low = [0 for _ in layers]
    high = [len(own) if large is not small else 0 for own, (large, small) in zip(layers, pairs)]
    while True:
        counts = [(first + last) // 2 for first, last in zip(low, high)]
        chosen = {
            name: (small if at < count else large).choice
            for own, (large, small), count in zip(layers, pairs, counts)
            for at, name in enumerate(own)
        }
        found = _planned(run, ChosenHomes(chosen), known)
        if low == high:
            return found
        for at, rank in enumerate(found.costs.ranks):
            if low[at] < high[at]:
                fits = rank.device_bytes <= run.room
                low[at], high[at] = (low[at], counts[at]) if fits else (counts[at] + 1, high[at])


def _pair(points: Sequence[_Point], run: Run) -> tuple[_Point, _Point]:
    """The two choices to mix: one that may be too large, and one that fits; the smallest twice if none does."""
    host = run.cluster.host_bytes_a_device
    usable = [point for point in points if point.rank.peak.host <= host] or list(points)
    small = [point for point in usable if point.rank.device_bytes <= run.room]
    large = [point for point in usable if point.rank.device_bytes > run.room]
    if not small:
        least = min(usable, key=lambda point: point.rank.device_bytes)
        return least, least

    def seconds(pair: tuple[_Point, _Point]) -> float:
        large, fits = pair
        over = large.rank.device_bytes - run.room
        part = over / (large.rank.device_bytes - fits.rank.device_bytes) if over > 0 else 1.0
        return part * fits.seconds + (1 - part) * large.seconds

    return min([*zip(small, small), *product(large, small)], key=seconds)


def _seconds(costs: StepCosts, rank: RankCosts) -> float:
    """What the homes of a rank's layers add for one microbatch, with waits for copies."""
    layers = [layer for stage in rank.stages for layer in stage.layers]
    again = sum(layer.recompute for layer in layers)
    moved = sum(layer.bytes_of("offload").total for layer in layers)
    beside = sum(layer.offload_seconds.total for layer in layers)
    kinds = ("forward", "backward_input", "backward_weight")
    compute = sum(getattr(layer, kind).total for layer in layers for kind in kinds)
    return again + 2 * beside + max(0.0, moved / costs.machine.link.both - compute - again)


def joined(policies: Sequence[Policy]) -> Policy:
    """The rules of all ranks: each names layers of its own."""
    return Policy([rule for policy in policies for rule in policy.rules])


def _rank_policy(layers: Sequence[str], chosen: Mapping[str, Choice], dense: int) -> Policy:
    """The rules of a rank; the first `dense` layers of the model have no experts."""
    rules: list[Rule] = []
    for choice in dict.fromkeys(chosen.get(name, ()) for name in layers):
        numbers = [int(name.removeprefix("layers.")) for name in layers if chosen.get(name, ()) == choice]
        for region, home in choice:
            own = [number for number in numbers if number >= dense or not region.startswith("moe.")]
            if own:
                rules += _policy(f"layers.{{{number_ranges(own)}}}", ((region, home),)).rules
    return Policy(rules)


def _policy(layers: str, choice: Choice) -> Policy:
    return Policy([Rule(f"{layers}.{region}" if region else layers, home) for region, home in choice])
