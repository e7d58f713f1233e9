"""Times of a measured profile, for a model on another device, layout or batch.

    seconds(part) = roofline(part, cluster) · measured(part) / roofline(part of the profiled step, profiled device)

A part of which the profile has no region has its roofline time. What the profile has and no part stands for is not
counted. Both are said by name.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagestash.models.config import DecoderConfig, shortened
from pagestash.simulation.cluster.cluster import Cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.seconds import Seconds
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.regions import part_of, split, timed_name
from pagestash.simulation.model.run import Run

if TYPE_CHECKING:  # a profile imports torch
    from pagestash.profiling.profiled import ProfiledStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a profile says of a model's parts."""

    factors: dict[str, tuple[float, float]]
    """By part: measured over roofline seconds, of forward and of backward."""
    uncounted: dict[str, float]
    """Seconds of regions that no part stands for; `*` for the number of a layer."""
    estimated: tuple[str, ...]
    """Parts that have no region in the profile."""

    def notes(self) -> list[str]:
        """What was not taken from the profile, in a sentence each."""
        found = []
        if self.uncounted:
            named = self.uncounted.items()
            told = ", ".join(f"{name or 'the model'} ({1e3 * own:.2f} ms)" for name, own in named)
            found.append(f"no part of a simulated layer stands for these regions of the profile: {told}")
        if self.estimated:
            found.append(f"not in the profile, so times are the roofline's: {', '.join(self.estimated)}")
        return found


def measured(profile: "ProfiledStep", config: DecoderConfig, cluster: Cluster) -> Measured:
    """The times of a profile of `config`, or of its first layers, on a device of `cluster`."""
    run = profiled_run(profile, config, cluster)
    layers, plain = layers_of(run), Seconds(run)
    parts = {layer.name: [part.name for part in layer.parts] for layer in layers}
    outside = [*parts["embed"], *parts["head"]]
    regions: dict[str, set[str]] = defaultdict(set)  # layers by part
    seconds: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    uncounted: dict[str, float] = defaultdict(float)
    for region in profile.regions:
        layer, inner = split(region.name)
        ahead, back = region.forward_seconds, region.backward_seconds
        name = part_of(inner, parts.get(layer, outside))
        if name:
            before = seconds[name]
            seconds[name] = before[0] + ahead, before[1] + back
            regions[name].add(layer)
        elif ahead + back > 0:
            uncounted[re.sub(r"\.\d+(?=\.|$)", ".*", region.name)] += ahead + back
    factors = {}
    for name, (forward, backward) in seconds.items():
        owners = [layer for layer in layers if layer.name in regions[name] or "" in regions[name]]
        own = [part for layer in owners for part in layer.parts if timed_name(part.name) == name]
        ahead = sum(plain.forward(part) for part in own)
        back = sum(plain.backward_input(part) + plain.backward_weight(part) for part in own)
        if name == "head":  # the loss computes gradients in forward
            factors[name] = ((forward + backward) / (ahead + back),) * 2
        else:
            factors[name] = forward / ahead if ahead else 1.0, backward / back if back else 1.0
    wanted = layers_of(replace(run, config=config))
    needed = dict.fromkeys(timed_name(part.name) for layer in wanted for part in layer.parts)
    estimated = tuple(name for name in needed if name not in factors)
    return Measured(factors=factors, uncounted=dict(uncounted), estimated=estimated)


def profiled_run(profile: "ProfiledStep", config: DecoderConfig, cluster: Cluster) -> Run:
    """The profiled step: its layers, batch, sequence and precision, from its regions and saved tensors."""
    numbers = {split(region.name)[0] for region in profile.regions} - {""}
    if not numbers or numbers != {f"layers.{number}" for number in range(len(numbers))}:
        raise ValueError(
            "the profile: expected regions of consecutive layers, layers.0 and so on, of the whole model"
        )
    inputs = (t for t in profile.tensors if t.kind == "input" and t.dtype == "int64" and len(t.shape) == 2)
    tokens = next((t.shape for t in inputs), None)
    if tokens is None:
        raise ValueError(
            "the profile saves no batch of tokens, which would say its sequences and their length"
        )
    stream = [t for t in profile.tensors if t.kind == "activation" and t.shape[:-1] == tokens]
    dtype = next((t.dtype for t in stream if t.shape[-1] == config.width), None)
    if dtype is None:
        widths = sorted({t.shape[-1] for t in stream if t.shape[-1] > 1})
        raise ValueError(
            f"the profile is of another model: its layers have a width of {widths[0] if widths else 'unknown'}, "
            f"not {config.width}"
        )
    return Run(
        config=shortened(config, len(numbers)),
        cluster=replace(cluster, devices=1),
        layout=Layout(devices=1),
        sequence=tokens[1],
        global_batch=tokens[0],
        microbatch=tokens[0],
        precision="fp32" if dtype == "float32" else "bf16",
    )
