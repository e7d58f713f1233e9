"""What a layer costs the rank that holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

MOST_COST = 1e30
"""The largest cost, so that sums and quotients stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of one layer; the embedding and the head are layers, too."""

    name: str
    parameters: int
    """Bytes for the whole run: this rank's part of weights, gradients and optimizer state."""
    activations: int
    """Bytes that one microbatch's forward saves for backward."""
    forward: float = 0.0
    """Time of one microbatch's forward, in any unit; `backward` has the same unit."""
    backward: float = 0.0

    def __post_init__(self) -> None:
        for name in ("parameters", "activations", "forward", "backward"):
            value = getattr(self, name)
            if not 0 <= value <= MOST_COST:
                bound = f"at most {MOST_COST:g}" if value > MOST_COST else "at least 0"
                raise ValueError(f"layer {self.name!r}: {name}={value}: expected {bound}")

    @property
    def time(self) -> float:
        """Time of forward and backward."""
        return self.forward + self.backward


def read_costs(layers: Mapping[str, Mapping[str, Any]]) -> list[LayerCost]:
    """Costs from a JSON object: `{"layers.0": {"parameters": 1024, "activations": 4096, …}, …}`.

    Layers are in the order of the object; `forward` and `backward` are optional.

    >>> read_costs({"embed": {"parameters": 64, "activations": 0}})[0].name
    'embed'
    """
    if not isinstance(layers, Mapping) or not all(isinstance(row, Mapping) for row in layers.values()):
        raise ValueError("costs: expected a table of layers, each with a table of its costs")
    known = [field.name for field in fields(LayerCost) if field.name != "name"]
    costs = []
    for name, row in layers.items():
        for key in ("parameters", "activations"):
            if key not in row:
                raise ValueError(f"layer {name!r}: {key} is missing")
        numbers: dict[str, Any] = {key: row[key] for key in known if key in row}
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"layer {name!r}: {key}={value!r}: expected a number")
        given = LayerCost(name=name, **numbers)
        costs.append(replace(given, parameters=int(given.parameters), activations=int(given.activations)))
    return costs


def measured_costs(profile: Mapping[str, Any], layers: Sequence[LayerCost]) -> list[LayerCost]:
    """`layers` with the activations and times of a `pagestash profile --json`; parameters are unchanged.

    The profiled batch counts as one microbatch. What the model saves outside all layers (the last norm, the loss)
    counts for the head.
    """
    regions = {row["name"]: row for row in profile["regions"]}
    found = []
    for layer in layers:
        rows, whole = [regions[layer.name]] if layer.name in regions else [], "total_"
        if not rows and layer is layers[-1]:
            rows, whole = [regions[name] for name in ("", "norm") if name in regions], ""
        if not rows:
            raise ValueError(
                f"the profile has no region {layer.name!r}: it is of another model, or cut short"
            )
        found.append(
            replace(
                layer,
                activations=sum(row[f"{whole}bytes"] for row in rows),
                forward=sum(row[f"{whole}forward_seconds"] for row in rows),
                backward=sum(row[f"{whole}backward_seconds"] for row in rows),
            )
        )
    extra = [name for name in regions if name.startswith("layers.") and name.count(".") == 1]
    if len(extra) > len(layers) - 2:
        raise ValueError(f"the profile has {len(extra)} layers, the model {len(layers) - 2}")
    return found
