"""What the host does for a layer: it launches kernels, and records regions that backward repeats.

A step whose kernels are shorter than their launches waits for the host. For each part of a layer,

    launches = products, once for each expert where a framework loops over them
             + a cast of each product's operand in 8 bits
             + collectives of tensor parallelism + kernels beside them (`OTHERS`)

in forward, and twice as many in backward. What a CUDA graph holds is one launch.

The sum is right for a layer that was counted: Qwen3-30B-A3B in Megatron-LM has 463,348 kernels in 64 microbatches
of 48 layers (Nsight profile of a step in Megatron-Bridge), which is 151 each; this gives 150.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pagestash.simulation.model.parts import Layer, Part

OTHERS = {
    "embed": 2,
    "attn_norm": 1,
    "attn.q_norm": 4,  # two norms, RoPE of queries and keys
    "attn.core_attn": 1,
    "attn.attn_proj": 1,  # the residual sum
    "mlp_norm": 1,
    "mlp": 2,
    "moe.router": 10,  # scores, choice, counts, auxiliary loss
    "moe.experts": 12,  # positions of rows, permutation, dispatch, combine, the residual sum
    "moe.moe_act": 1,
    "moe.shared_experts": 2,
    "moe.latent": 0,
    "mtp.proj": 4,
    "norm": 1,
    "mtp.norm": 1,
    "head": 4,
    "mtp.head": 4,
}
"""Kernels of forward beside products and collectives."""
LATENT = 8
"""The same of latent attention's projections: norms, RoPE, and the parts of heads put together."""
BACKWARD = 2
"""Launches of backward over those of forward."""
GRAPHED: dict[str, tuple[str, ...]] = {
    "attn": ("attn_norm", "attn.qkv_linear", "attn.q_norm", "attn.core_attn", "attn.attn_proj"),
    "router": ("mlp_norm", "moe.router", "moe.shared_experts"),
    "mlp": ("mlp_norm", "mlp"),
    "full": (),
}
"""Parts by the scope of a CUDA graph: Megatron-LM's `attn`, `moe_router` with `moe_preprocess`, and `mlp`. In a
graph of the full iteration nothing is launched by itself."""


class HostSeconds(NamedTuple):
    """Of one layer and microbatch, by the piece of a program that is launched."""

    forward: float = 0.0
    forward_rows: float = 0.0
    """What comes between dispatch and combine."""
    backward: float = 0.0
    backward_rows: float = 0.0
    recompute: float = 0.0


def launches(part: Part, *, loops: bool, casts: bool = False) -> int:
    """Kernels of the part's forward.

    `loops`: experts' products are launched one by one. `casts`: operands are cast.
    """
    products = _products(part, loops) * (2 if casts else 1)
    return products + len(part.gathers) + OTHERS.get(part.name, 0) + (LATENT if _is_latent(part) else 0)


def step_launches(layers: Sequence[Layer], *, loops: bool, each: int) -> int:
    """Kernels of the optimizer's step, `each` for a tensor of parameters."""
    return each * sum(tensors(part, loops=loops) for layer in layers for part in layer.parts)


def tensors(part: Part, *, loops: bool) -> int:
    """Parameters of a part: the weight of each product, or of a norm; experts' one by one where they are so."""
    if not part.parameters:
        return 0
    norms = len(part.products) - 2 if _is_latent(part) else int(not part.products)
    return _products(part, loops) + norms


def _products(part: Part, loops: bool) -> int:
    return sum(product.groups if loops else 1 for product in part.products)


def _is_latent(part: Part) -> bool:
    return part.name == "attn.qkv_linear" and len(part.products) > 1


def graphed_parts(scopes: Collection[str]) -> frozenset[str]:
    """The parts of these scopes."""
    return frozenset(name for scope in scopes for name in GRAPHED[scope])


def host_seconds(
    layer: Layer,
    *,
    launch: float,
    loops: bool,
    casts: bool = False,
    scopes: Collection[str] = (),
    repeated: Mapping[str, float] | None = None,
    regions: int = 0,
    region: float = 0.0,
) -> HostSeconds:
    """The host's time for a layer.

    `regions` recomputed regions repeat the share `repeated` of each part's forward, and take `region` seconds each.
    """
    if "full" in scopes:
        return HostSeconds()
    graphs = graphed_parts(scopes)
    eager = {
        part.name: launches(part, loops=loops, casts=casts) for part in layer.parts if part.name not in graphs
    }

    def seconds(routed: bool) -> float:
        own = {part.name for part in layer.parts if part.routed is routed}
        whole = sum(not own.isdisjoint(GRAPHED[scope]) for scope in scopes)
        return launch * (whole + sum(count for name, count in eager.items() if name in own))

    fixed, rows = seconds(routed=False), seconds(routed=True)
    again = sum(share * eager.get(name, 0) for name, share in (repeated or {}).items())
    return HostSeconds(fixed, rows, BACKWARD * fixed, BACKWARD * rows, launch * again + regions * region)
