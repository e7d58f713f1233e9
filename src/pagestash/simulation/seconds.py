"""Seconds of a module: by the cluster's roofline, or as a profile measured them, scaled by the roofline.

    seconds(part) = roofline(part, cluster) · measured(part) / roofline(part of the profiled step, profiled cluster)

where a profile has the part's region; a part without one has its roofline time. Backward by the roofline: gradients
of inputs are as many operations as forward, those of weights again as many; attention's backward is 2.5 times its
forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagestash.profiling.profiled import ProfiledStep
from pagestash.simulation.cluster import Cluster, Precision
from pagestash.simulation.parts import (
    ACTIVATION,
    RESIDUAL,
    STATISTICS,
    UP,
    Layer,
    Part,
    Product,
    Shape,
    layers_of,
)

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward over its forward: five products for two."""
_FUSED = ("moe.expert_fc1", "moe.moe_act", "moe.expert_fc2", "moe.combine", "moe.experts")
"""Run as one node, whose time is that of `moe.experts`."""
_ALWAYS_BF16 = ("moe.router", "head", "embed")


@dataclass(frozen=True)
class Seconds:
    """Times of one rank's modules."""

    cluster: Cluster
    precision: Precision = "bf16"
    layout_tp: int = 1
    layout_cp: int = 1
    factors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By part: measured over roofline seconds, of forward and of backward."""

    def forward(self, part: Part) -> float:
        return self._factor(part)[0] * self._compute(part) + self._collectives(part)

    def backward_input(self, part: Part) -> float:
        turned = [Product(p.m, p.k, p.n, p.groups) for p in part.products]
        own = self._products(part, turned) + self.cluster.kernel_seconds(1.5 * part.traffic)
        scores = ATTENTION_BACKWARD * self.cluster.attention_seconds(part.scores)
        return self._factor(part)[1] * (own + scores) + self._collectives(part)

    def backward_weight(self, part: Part) -> float:
        turned = [Product(p.n, p.k, p.m, p.groups) for p in part.products]
        return self._factor(part)[1] * self._products(part, turned)

    def recompute(self, layer: Layer, makers: set[str]) -> tuple[float, float]:
        """Seconds of forward that bring back what these regions made: independent of received rows, and not."""
        fixed = routed = 0.0
        for part in layer.parts:
            share = max((_share(part, maker) for maker in makers), default=0.0)
            if part.routed:
                routed += share * self.forward(part)
            else:
                fixed += share * self.forward(part)
        return fixed, routed

    def _compute(self, part: Part) -> float:
        kernels = self.cluster.kernel_seconds(part.traffic)
        return self._products(part, part.products) + self.cluster.attention_seconds(part.scores) + kernels

    def _products(self, part: Part, products: Sequence[Product]) -> float:
        precision: Precision = "bf16" if part.name in _ALWAYS_BF16 else self.precision
        return sum(self.cluster.product_seconds(p.m, p.n, p.k, precision, p.groups) for p in products)

    def _collectives(self, part: Part) -> float:
        shared = sum(self.cluster.gather_seconds(size, self.layout_tp) for size in part.gathers)
        return shared + self.cluster.gather_seconds(part.context_bytes, self.layout_cp, self.layout_tp)

    def _factor(self, part: Part) -> tuple[float, float]:
        return self.factors.get("moe.experts" if part.name in _FUSED else part.name, (1.0, 1.0))


def _share(part: Part, maker: str) -> float:
    """The part of a module's forward that recomputing what `maker` made repeats."""
    if maker == RESIDUAL:
        return float(part.name == "attn.attn_proj")
    if maker == UP and part.name == "attn.qkv_linear":
        up = sum(product.operations for product in part.products[1:3])
        return up / max(1.0, part.operations)
    made_by = {
        "moe.moe_act": "moe.expert_fc1",
        ACTIVATION: "moe.moe_act",
        STATISTICS: "attn.core_attn",
        "attn": "attn.q_norm",
    }
    return float(part.name == made_by.get(maker, maker))


def factors(profile: ProfiledStep, shape: Shape, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Measured over roofline seconds of each part, for a profile of `shape` on a device of `cluster`."""
    measured: dict[str, list[float]] = {}
    counted: dict[str, set[str]] = {}
    layers = layers_of(shape)
    names = {part.name for layer in layers for part in layer.parts}
    for region in profile.regions:
        words = region.name.split(".")
        layer, inner = (".".join(words[:2]), words[2:]) if words[0] == "layers" else ("", words)
        name = _part_of(inner, names)
        if name:
            seconds = measured.setdefault(name, [0.0, 0.0])
            seconds[0] += region.forward_seconds
            seconds[1] += region.backward_seconds
            counted.setdefault(name, set()).add(layer)
    plain = Seconds(cluster)
    found: dict[str, tuple[float, float]] = {}
    for name, (forward, backward) in measured.items():
        own = [
            part
            for layer in layers
            if layer.name in counted[name] or "" in counted[name]
            for part in layer.parts
            if part.name == name or (name == "moe.experts" and part.name in _FUSED)
        ]
        ahead = sum(plain.forward(part) for part in own)
        back = sum(plain.backward_input(part) + plain.backward_weight(part) for part in own)
        if (
            name == "head" and ahead + back > 0 and forward + backward > 0
        ):  # the loss computes gradients in forward
            found[name] = ((forward + backward) / (ahead + back),) * 2
        elif ahead > 0 and back > 0 and forward > 0 and backward > 0:
            found[name] = forward / ahead, backward / back
    return found


def _part_of(words: Sequence[str], names: set[str]) -> str:
    """The part that a region of a profile belongs to: the longest name that it begins with.

    What runs outside all regions counts for the head, as in `pipeline.costs.measured_costs`.
    """
    if list(words) == [""]:
        return "head"
    if words[:2] == ["attn", "k_norm"] or list(words) == ["attn"]:
        return "attn.q_norm" if "attn.q_norm" in names else "attn.core_attn"
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in _FUSED:
            return "moe.experts"
        if name in names:
            return name
    return ""
