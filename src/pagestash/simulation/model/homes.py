"""Where each saved tensor of a layer waits: by a policy's rules, or by the names of Megatron-LM's options."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagestash.policy import HomeName, Policy, PoolConfig, Rule
from pagestash.simulation.model.parts import (
    ACTIVATION,
    HEAD_NORMS,
    HELD,
    KV_UP,
    RESIDUAL,
    ROPE,
    STATISTICS,
    UP,
    Layer,
    Part,
    Piece,
)
from pagestash.simulation.model.regions import aliases


@dataclass(frozen=True, slots=True)
class Placed:
    """A saved tensor, or the part of one that a rule's fraction leaves or moves."""

    part: str
    home: HomeName
    bytes: int
    routed: bool
    scope: str = ""
    """The rule's region within the layer, "" for the layer: what is recomputed, offloaded or stashed together."""
    maker: str = HELD
    window: int | None = None
    """Its rule's `prefetch_bytes`."""
    reruns: bool = False
    """Whether all of its region runs again, communication included: a checkpoint as Megatron-LM has them."""


class Homes:
    """Gives each piece of a layer its home."""

    @property
    def pool(self) -> PoolConfig:
        return PoolConfig()

    def place(self, layer: Layer) -> tuple[Placed, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class PolicyHomes(Homes):
    """By the rules of a policy, as a keeper applies them to regions.

    A tensor that a recomputed region makes is dropped, unless the region that saves it has a rule to keep it. Any
    other tensor has the home of the region that saves it. The innermost region that has a rule decides.
    """

    policy: Policy = field(default_factory=lambda: Policy([]))
    _found: dict[str, Rule | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Rules by region, looked up once."""

    def __post_init__(self) -> None:
        self.policy.refuse_bits("a simulation")
        for rule in self.policy.rules:
            if rule.home == "stash" and rule.fraction:
                raise ValueError(
                    f"rule {rule.match!r}: fraction={rule.fraction:g} with home='stash' offloads expected rows, "
                    "which simulated layers do not have; plan it from a profile, or simulate home='offload'"
                )

    @property
    def pool(self) -> PoolConfig:
        return self.policy.pool

    def place(self, layer: Layer) -> tuple[Placed, ...]:
        pieces = ((part, piece) for part in layer.parts for piece in part.pieces)
        return tuple(placed for own in pieces for placed in self._place(layer, *own))

    def _place(self, layer: Layer, part: Part, piece: Piece) -> Iterable[Placed]:
        rule, scope = self._rule(layer.name, part.name)
        remade, maker = self._remade(layer, piece)
        home: HomeName = "keep" if rule is None or piece.bytes < rule.least_bytes else rule.home
        if remade and (rule is None or rule.home != "keep"):
            home, scope = "recompute", maker
        elif home == "recompute":  # what its own replay would not bring back
            home = "keep"
        moved, window = piece.bytes, None
        if home == "offload" and rule is not None:
            moved, window = round(rule.fraction * piece.bytes), rule.prefetch_bytes
            if moved < piece.bytes:
                yield Placed(part.name, "keep", piece.bytes - moved, part.routed)
        yield Placed(part.name, home, moved, part.routed, scope, piece.maker, window)

    def _remade(self, layer: Layer, piece: Piece) -> tuple[bool, str]:
        """Whether backward makes the piece again, and the region whose rule says so."""
        if piece.maker == HELD:
            return False, ""
        rule, region = self._rule(layer.name, piece.maker)
        if region == ROPE and any(part.name == HEAD_NORMS for part in layer.parts):
            # The norms' results have the size of what RoPE made: nothing is gained unless they are made again, too.
            norms, _ = self._rule(layer.name, HEAD_NORMS)
            return all(each is not None and each.home == "recompute" for each in (rule, norms)), region
        return rule is not None and rule.home == "recompute", region

    def _rule(self, layer: str, region: str) -> tuple[Rule | None, str]:
        """The rule of the innermost region, and that region within the layer."""
        inner = "" if region in (RESIDUAL, layer) else region
        while True:
            name = f"{layer}.{inner}" if inner else layer
            if name not in self._found:
                rules = map(self.policy.rule_for, aliases(layer, inner))
                self._found[name] = next((rule for rule in rules if rule is not None), None)
            rule = self._found[name]
            if rule is not None:
                return rule, inner
            if not inner:
                return None, ""
            # The experts run these three in one node, and their rule is for all of it.
            fused = inner in ("moe.expert_fc1", "moe.moe_act", "moe.expert_fc2")
            inner = "moe.experts" if fused else inner.rpartition(".")[0]


_RECOMPUTE = {
    "core_attn": (STATISTICS,),
    "mla_up_proj": (UP, KV_UP),
    "layernorm": ("attn_norm", "mlp_norm"),
    "moe_act": (ACTIVATION,),
    "mlp": ("mlp",),
    "shared_experts": ("moe.shared_experts",),
    "moe": (),
}
"""`--recompute-modules`: the makers of what each drops. Of core attention the result stays, for the projection.
`moe` runs the whole MoE layer again, dispatch and combine included."""
_OFFLOAD = {
    "attn_norm": "attn_norm",
    "qkv_linear": "attn.qkv_linear",
    "core_attn": "attn.core_attn",
    "attn_proj": "attn.attn_proj",
    "mlp_norm": "mlp_norm",
    "expert_fc1": "moe.expert_fc1",
    "moe_act": "moe.moe_act",
}
"""`--offload-modules`: the part whose saved tensors leave."""


@dataclass(frozen=True)
class MegatronHomes(Homes):
    """By Megatron-LM's `--recompute-modules` and `--offload-modules`."""

    recompute: Sequence[str] = ()
    offload: Sequence[str] = ()
    stash: bool = False
    """`--moe-paged-stash`: what experts keep of received rows is in pages."""
    full: bool = False
    """`--recompute-granularity full`: layers keep their input alone."""

    def __post_init__(self) -> None:
        for names, known in ((self.recompute, _RECOMPUTE), (self.offload, _OFFLOAD)):
            for name in names:
                if name not in known:
                    raise ValueError(f"unknown module {name!r}; expected some of {', '.join(known)}")

    def __str__(self) -> str:
        if self.full:
            return "whole layers are recomputed"
        parts = ("recompute", self.recompute), ("offload", self.offload), ("stash", ["experts"] * self.stash)
        return "; ".join(f"{home} {', '.join(names)}" for home, names in parts if names) or "all is kept"

    def place(self, layer: Layer) -> tuple[Placed, ...]:
        dropped = {maker for name in self.recompute for maker in _RECOMPUTE[name]}
        moved = {_OFFLOAD[name] for name in self.offload}
        placed = []
        for part in layer.parts:
            for piece in part.pieces:
                home: HomeName = "keep"
                scope, reruns = "", False
                if self.full:
                    if layer.name.startswith("layers.") and piece is not layer.parts[0].pieces[0]:
                        home, reruns = "recompute", True
                elif "moe" in self.recompute and part.name.startswith("moe.") and piece.maker != "mlp_norm":
                    home, scope, reruns = "recompute", "moe", True
                elif piece.maker in dropped:
                    home, scope = "recompute", UP if piece.maker == KV_UP else piece.maker  # one region
                elif part.name in moved:
                    home, scope = "offload", part.name
                elif self.stash and part.routed:
                    home, scope = "stash", part.name
                own = Placed(part.name, home, piece.bytes, part.routed, scope, piece.maker, reruns=reruns)
                placed.append(own)
            if "core_attn" in self.recompute and part.view_bytes:
                placed.append(Placed(part.name, "keep", part.view_bytes, part.routed))
        return tuple(placed)
