"""Times of a measured profile, for a model on another device, layout or batch.

    seconds(part) = roofline(part, cluster) · measured(part) / roofline(part of the profiled step, profiled device)

A part of which the profile has no region has its roofline time. What the profile has and no part stands for is not
counted. Both are said by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pagestash.models.config import DecoderConfig
from pagestash.simulation.cluster.cluster import Cluster, Precision
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.seconds import Seconds
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.parts import Layer, Part, Shape
from pagestash.simulation.model.regions import EXPERTS, part_of, split

if TYPE_CHECKING:  # a profile imports torch
    from pagestash.profiling.profiled import ProfiledStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a profile says of a model's parts."""

    factors: dict[str, tuple[float, float]]
    """By part: measured over roofline seconds, of forward and of backward."""
    seconds: float
    """Of the profiled step's forward and backward, all parts."""
    uncounted: dict[str, float]
    """Seconds of regions that no part stands for; `*` for the number of a layer."""
    estimated: tuple[str, ...]
    """Parts that have no region in the profile."""

    def notes(self) -> list[str]:
        """What was not taken from the profile, in a sentence each."""
        found = []
        if self.uncounted:
            told = ", ".join(
                f"{name or 'the model'} ({1e3 * own:.2f} ms)" for name, own in self.uncounted.items()
            )
            found.append(f"no part of a simulated layer stands for these regions of the profile: {told}")
        if self.estimated:
            found.append(f"not in the profile, so times are the roofline's: {', '.join(self.estimated)}")
        return found


def measured(profile: "ProfiledStep", config: DecoderConfig, cluster: Cluster) -> Measured:
    """The times of a profile of `config`, or of its first layers, on a device of `cluster`."""
    shape, precision = profiled_shape(profile, config)
    return measure_parts(
        profile, layers_of(shape), Seconds(cluster, precision), layers_of(_whole(shape, config))
    )


def profiled_shape(profile: "ProfiledStep", config: DecoderConfig) -> tuple[Shape, Precision]:
    """Layers, batch, sequence and precision of the profiled step, from its regions and saved tensors."""
    numbers = {split(region.name)[0] for region in profile.regions} - {""}
    layers = len(numbers)
    if not layers or numbers != {f"layers.{number}" for number in range(layers)}:
        raise ValueError(
            "the profile: expected regions of consecutive layers, layers.0 and so on, of the whole model"
        )
    tokens = next(
        (t.shape for t in profile.tensors if t.kind == "input" and t.dtype == "int64" and len(t.shape) == 2),
        None,
    )
    if tokens is None:
        raise ValueError(
            "the profile saves no batch of tokens, which would say its sequences and their length"
        )
    stream = [t for t in profile.tensors if t.kind == "activation" and t.shape[:-1] == tokens]
    if not any(t.shape[-1] == config.width for t in stream):
        widths = sorted({t.shape[-1] for t in stream if t.shape[-1] > 1})
        raise ValueError(
            f"the profile is of another model: its layers have a width of {widths[0] if widths else 'unknown'}, "
            f"not {config.width}"
        )
    dtype = next(t.dtype for t in stream if t.shape[-1] == config.width)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    short = DecoderConfig(**values | {"layers": layers, "dense_layers": min(config.dense_layers, layers - 1)})
    size = 4 if dtype == "float32" else 2
    shape = Shape(
        config=short,
        layout=Layout(devices=1),
        sequence=tokens[1],
        microbatch=tokens[0],
        element_bytes=size,
        product_bytes=float(size),
    )
    return shape, "fp32" if dtype == "float32" else "bf16"


def _whole(shape: Shape, config: DecoderConfig) -> Shape:
    return Shape(config=config, layout=shape.layout, sequence=shape.sequence)


def measure_parts(
    profile: "ProfiledStep", layers: Sequence[Layer], plain: Seconds, wanted: Sequence[Layer]
) -> Measured:
    """Measured over roofline seconds of each part of `layers`, the profiled step's; `wanted` are simulated."""
    parts = {layer.name: [part.name for part in layer.parts] for layer in layers}
    outside = [*parts["embed"], *parts["head"]]
    seconds: dict[str, list[float]] = {}
    owners: dict[str, set[str]] = {}
    uncounted: dict[str, float] = {}
    for region in profile.regions:
        layer, inner = split(region.name)
        name = part_of(inner, parts.get(layer, outside))
        if name:
            own = seconds.setdefault(name, [0.0, 0.0])
            own[0] += region.forward_seconds
            own[1] += region.backward_seconds
            owners.setdefault(name, set()).add(layer)
        elif region.forward_seconds + region.backward_seconds > 0:
            told = re.sub(r"\.\d+(?=\.|$)", ".*", region.name)
            uncounted[told] = uncounted.get(told, 0.0) + region.forward_seconds + region.backward_seconds
    found = {}
    for name, (forward, backward) in seconds.items():
        own_parts = [
            part
            for layer in layers
            if layer.name in owners[name] or "" in owners[name]
            for part in layer.parts
            if _name(part) == name
        ]
        ahead = sum(plain.forward(part) for part in own_parts)
        back = sum(plain.backward_input(part) + plain.backward_weight(part) for part in own_parts)
        if name == "head":  # the loss computes gradients in forward
            found[name] = ((forward + backward) / (ahead + back),) * 2
        else:
            found[name] = forward / ahead if ahead else 1.0, backward / back if back else 1.0
    needed = dict.fromkeys(_name(part) for layer in wanted for part in layer.parts)
    return Measured(
        factors=found,
        seconds=sum(region.forward_seconds + region.backward_seconds for region in profile.regions),
        uncounted=uncounted,
        estimated=tuple(name for name in needed if name not in found),
    )


def _name(part: Part) -> str:
    return "moe.experts" if part.name in EXPERTS else part.name
