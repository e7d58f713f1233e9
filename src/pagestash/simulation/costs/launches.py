"""What the host does for a layer: it launches kernels, and records regions that backward repeats.

A step whose kernels are shorter than their launches waits for the host. For each part of a layer,

    launches = products, once for each expert where a framework loops over them
             + a cast of each product's operand in 8 bits
             + collectives of tensor parallelism + kernels beside them (`Part.kernels`)

in forward, and twice as many in backward. What a CUDA graph holds is one launch.

The sum is right for a layer that was counted: Qwen3-30B-A3B in Megatron-LM has 463,348 kernels in 64 microbatches
of 48 layers (Nsight profile of a step in Megatron-Bridge), which is 151 each; this gives 150.
"""

from collections.abc import Mapping, Sequence

from pagestash.simulation.costs.costs import NOTHING, Amount
from pagestash.simulation.model.framework import Framework
from pagestash.simulation.model.parts import Layer, Part
from pagestash.simulation.model.run import GRAPHED, Run


def launches(part: Part, *, loops: bool, casts: bool = False) -> int:
    """Kernels of the part's forward.

    `loops`: experts' products are launched one by one. `casts`: operands are cast.
    """
    return _products(part, loops) * (2 if casts else 1) + len(part.gathers) + part.kernels


def step_launches(layers: Sequence[Layer], frame: Framework) -> int:
    """Kernels of the optimizer's step, where it goes through parameters one by one: weights, norms, experts."""
    parts = [part for layer in layers for part in layer.parts if part.parameters]
    tensors = sum(_products(part, frame.loops_experts) + part.norms for part in parts)
    return frame.step_launches * tensors


def _products(part: Part, loops: bool) -> int:
    return sum(product.groups if loops else 1 for product in part.products)


def graphed_parts(run: Run) -> frozenset[str]:
    """Parts whose kernels are in CUDA graphs of their layer."""
    return frozenset(name for scope in run.graphs for name in GRAPHED[scope])


def launch_seconds(run: Run, layer: Layer, again: Mapping[str, float], regions: int) -> tuple[Amount, float]:
    """The host's time for a layer's forward, and for the share `again` of parts that recomputed regions repeat."""
    if "full" in run.graphs:
        return NOTHING, 0.0
    launch, graphed = run.cluster.host.launch, graphed_parts(run)
    eager = {
        part.name: launches(part, loops=run.framework.loops_experts, casts=run.quantized)
        for part in layer.parts
        if part.name not in graphed
    }

    def seconds(routed: bool) -> float:
        own = {part.name for part in layer.parts if part.routed is routed}
        graphs = sum(not own.isdisjoint(GRAPHED[scope]) for scope in run.graphs)
        return launch * (graphs + sum(count for name, count in eager.items() if name in own))

    repeated = launch * sum(again[name] * count for name, count in eager.items())
    return Amount(seconds(routed=False), seconds(routed=True)), repeated + regions * run.cluster.host.region
