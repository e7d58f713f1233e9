"""Seconds of a module by the cluster's roofline.

Backward: gradients of inputs are as many operations as forward, those of weights again as many; attention's
backward is 2.5 times its forward.
"""

from collections.abc import Collection, Iterable, Sequence

from pagestash.simulation.cluster.cluster import Precision
from pagestash.simulation.costs.launches import launches
from pagestash.simulation.model.parts import (
    ACTIVATION,
    HEAD_NORMS,
    KV_UP,
    RESIDUAL,
    ROPE,
    STATISTICS,
    UP,
    Part,
    Product,
)
from pagestash.simulation.model.run import Run

CAST_BYTES: dict[str, int] = {"mxfp8": 4, "fp8": 6}
"""Read and written of each element of a product's operand in 8 bits: once in 16 bits, twice in 8. FP8 with one
scale for the whole tensor reads it once more, for its largest value."""
ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward over its forward: five products for two."""
_ALWAYS_BF16 = ("moe.router", "head", "mtp.head", "embed")


class Seconds:
    """Times of one rank's modules."""

    def __init__(self, run: Run) -> None:
        self.run, self.cluster = run, run.cluster

    def forward(self, part: Part) -> float:
        return self._compute(part) + self._collectives(part)

    def backward_input(self, part: Part) -> float:
        turned = [Product(p.m, p.k, p.n, p.groups) for p in part.products]
        own = self._products(part, turned) + self.cluster.kernel_seconds(1.5 * part.traffic)
        own += self._kernels(part) + self._casts(part, (product.m * product.n for product in part.products))
        scores = ATTENTION_BACKWARD * self.cluster.attention_seconds(part.scores)
        return own + scores + self._collectives(part)

    def backward_weight(self, part: Part) -> float:
        turned = [Product(p.n, p.k, p.m, p.groups) for p in part.products]
        return self._products(part, turned) + self._kernels(part)

    def _compute(self, part: Part) -> float:
        kernels = self.cluster.kernel_seconds(part.traffic) + self._kernels(part)
        kernels += self._casts(part, (product.m * product.k for product in part.products))
        return self._products(part, part.products) + self.cluster.attention_seconds(part.scores) + kernels

    def _kernels(self, part: Part) -> float:
        """What kernels take to begin and to end; experts' products run side by side."""
        return self.cluster.device.kernel * launches(part, loops=False)

    def _casts(self, part: Part, elements: Iterable[float]) -> float:
        """In 8 bits a product's operand is read, and written along both of its dimensions."""
        each = CAST_BYTES.get(self.run.precision, 0) if part.name not in _ALWAYS_BF16 else 0
        groups = max((product.groups for product in part.products), default=1)
        return self.cluster.kernel_seconds(each * groups * sum(elements)) if each else 0.0

    def _products(self, part: Part, products: Sequence[Product]) -> float:
        precision: Precision = "bf16" if part.name in _ALWAYS_BF16 else self.run.precision
        return sum(self.cluster.product_seconds(p.m, p.n, p.k, precision, p.groups) for p in products)

    def _collectives(self, part: Part) -> float:
        shared = sum(self.cluster.gather_seconds(size, self.run.layout.tp) for size in part.gathers)
        return shared + self.cluster.gather_seconds(
            part.context_bytes, self.run.layout.cp, self.run.layout.tp
        )


def repeated(part: Part, makers: Collection[str], whole: Collection[str] = ()) -> float:
    """The share of the part's forward that recomputing what these regions made runs again.

    Regions in `whole` run again in all.
    """
    if any(not region or part.name == region or part.name.startswith(f"{region}.") for region in whole):
        return 1.0
    return max((_share(part, maker) for maker in makers), default=0.0)


def _share(part: Part, maker: str) -> float:
    """The part of a module's forward that recomputing what `maker` made repeats."""
    if maker == RESIDUAL:
        return float(part.name == "attn.attn_proj")
    if maker in (UP, KV_UP) and part.name == "attn.qkv_linear":
        up = sum(product.operations for product in part.products[1 : 3 if maker == UP else 2])
        return up / max(1.0, part.operations)
    made_by = {
        "moe.moe_act": "moe.expert_fc1",
        ACTIVATION: "moe.moe_act",
        STATISTICS: "attn.core_attn",
        ROPE: HEAD_NORMS,
    }
    return float(part.name == made_by.get(maker, maker))
