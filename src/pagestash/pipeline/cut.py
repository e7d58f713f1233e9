"""A profile of a whole model, cut into layers and put together again as pipeline stages.

A *layer* is what has one number in its name, with all regions inside. What runs before the first one is the layer
`embed`, what runs after the last one is `head`. Regions around layers (the model itself) belong to the layer that
ran last, in forward and in backward.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pagestash.pipeline.costs import LayerCost
from pagestash.planning.choices import layer_of
from pagestash.planning.lifetimes import MeasuredStep, with_memory
from pagestash.planning.unrolled import StageStep, gradients_so_far
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import ALLOCATED, USER, Region, SavedTensor, Segment

EMBED, HEAD = "embed", "head"


@dataclass(slots=True)
class Layer:
    """A layer's share of the step."""

    name: str
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    """Its segments."""
    regions: list[Region] = field(default_factory=list)
    tensors: list[SavedTensor] = field(default_factory=list)
    parameters: int = 0
    """Bytes of its weights."""

    @property
    def outputs(self) -> set[int]:
        return {storage for region in self.regions for storage in region.outputs}


class WholeModel:
    """A profiled model as a list of layers."""

    def __init__(self, profile: ProfiledStep, parameters: Mapping[str, int] | None = None) -> None:
        """`parameters` are the bytes of weights by layer; by default those of the profile."""
        self.profile = profile
        self.step = MeasuredStep(profile)
        self._gradients = gradients_so_far(self.step, 0)
        paths = [segment.path for segment in profile.segments]
        self._around = {name for path in paths if _layer(path) for name in path[: _depth(path)]}
        """Regions that have layers inside."""
        self.layers = self._layers()
        self._add_parameters(parameters)

    # --- layers ---

    def _layers(self) -> list[Layer]:
        segments, turn = self.profile.segments, self.step.turn
        numbered = [at for at in range(turn) if _layer(segments[at].path)]
        if not numbered:
            raise ValueError("the profile has no numbered layers: a pipeline needs some to divide")
        found: dict[str, Layer] = {}
        home: dict[str, str] = {}
        last = EMBED
        for at in range(turn):
            path = segments[at].path
            name = _layer(path) or (EMBED if at < numbered[0] else HEAD if at > numbered[-1] else last)
            found.setdefault(name, Layer(name)).forward.append(at)
            home.setdefault(path[-1], name)
            last = name
        ran = {at: layer.name for layer in found.values() for at in layer.forward}
        last = HEAD if HEAD in found else last
        for at in range(turn, self.step.count):
            path = segments[at].path
            inner = None if path[-1] in self._around else home.get(path[-1])
            last = _layer(path) or inner or last
            found[last].backward.append(at)
        for tensor in self.profile.tensors:
            name = _layer(tensor.path) or ran[tensor.saved_at]
            found[name].tensors.append(tensor)
        for region in self.profile.regions:
            if region.name not in self._around:
                name = layer_of(region.name) or home.get(region.name) or home.get(region.within) or HEAD
                found[name].regions.append(region)
        for small, beside in ((EMBED, segments[numbered[0]].path), (HEAD, segments[numbered[-1]].path)):
            own = found.get(small)
            if own is not None and not own.regions and not any(t.counted for t in own.tensors):
                other = found[_layer(beside) or small]  # nothing but the calls of what is around
                other.forward = sorted(other.forward + own.forward)
                other.backward = sorted(other.backward + own.backward)
                other.tensors = sorted(other.tensors + own.tensors, key=lambda tensor: tensor.saved_at)
                del found[small]
        return list(found.values())

    def _add_parameters(self, given: Mapping[str, int] | None) -> None:
        by_name = {layer.name: layer for layer in self.layers}
        if given is not None:
            missing = sorted(by_name.keys() - given.keys())
            if missing:
                raise ValueError(
                    f"parameters: {', '.join(missing)} missing; expected the bytes of every layer's weights"
                )
            for name, layer in by_name.items():
                layer.parameters = given[name]
            return
        last = self.layers[0]
        for name, size in self.profile.parameter_bytes.items():  # in the order of the model's modules
            numbered = layer_of(name)
            if numbered in by_name:
                last = by_name[numbered]
            owner = by_name.get(numbered or "") or self._owner(name)
            if owner is None:  # used without being called: before or after the layers
                owner = self.layers[0] if last is self.layers[0] else self.layers[-1]
            owner.parameters += size

    def _owner(self, name: str) -> Layer | None:
        return next((layer for layer in self.layers if any(r.name == name for r in layer.regions)), None)

    def costs(self, optimizer_bytes: int = 0) -> list[LayerCost]:
        """What each layer costs: its weights, gradients and part of the optimizer's state; saved bytes; seconds."""
        weights = sum(layer.parameters for layer in self.layers) or 1
        beside = self.profile.gradient_bytes + optimizer_bytes
        seconds = self.step.seconds
        return [
            LayerCost(
                name=layer.name,
                parameters=layer.parameters + beside * layer.parameters // weights,
                activations=sum(tensor.counted for tensor in layer.tensors),
                forward=sum(seconds[at] for at in layer.forward),
                backward=sum(seconds[at] for at in layer.backward),
            )
            for layer in self.layers
        ]

    # --- stages ---

    def stage(self, index: int, first: int, end: int) -> StageStep:
        """The layers from `first` up to `end` as one stage."""
        layers = self.layers[first:end]
        got = self._message(first)
        forward = sorted(at for layer in layers for at in layer.forward)
        backward = sorted(at for layer in layers for at in layer.backward)
        tensors = self._tensors(layers, forward, backward, got)
        weights = sum(layer.parameters for layer in self.layers) or 1
        own = sum(layer.parameters for layer in layers)
        profile = replace(
            self.profile,
            tensors=tensors,
            regions=self._regions(layers, tensors),
            segments=self._segments(forward, backward, tensors),
            plain_seconds=sum(self.step.seconds[at] for at in (*forward, *backward)),
            loop_seconds=None,
            model_bytes=own,
            gradient_bytes=self.profile.gradient_bytes * own // weights,
            parameter_bytes={},
            allocated_bytes=None,
        )
        last = end == len(self.layers)
        return StageStep(
            index=index,
            profile=profile,
            received_bytes=sum(got.values()),
            result_bytes=0 if last else sum(self._message(end).values()),
            is_last=last,
            saves_input=True,
        )

    def _message(self, first: int) -> dict[int, int]:
        """What the layer before `first` hands on and a layer from there on saves: storages and their bytes."""
        if not first:
            return {}
        made = self.layers[first - 1].outputs
        later = (tensor for layer in self.layers[first:] for tensor in layer.tensors)
        return {t.storage: t.storage_bytes for t in later if t.storage in made and t.kind in ALLOCATED}

    def _tensors(
        self, layers: Sequence[Layer], forward: Sequence[int], backward: Sequence[int], got: Mapping[int, int]
    ) -> list[SavedTensor]:
        """The layers' tensors. A storage that other layers save, too, counts here with its first."""
        counted: set[int] = set()
        found = []
        gone = self._gradients[backward[0] - 1] if backward else 0
        for tensor in (tensor for layer in layers for tensor in layer.tensors):
            first = tensor.kind in ALLOCATED and tensor.storage not in counted
            counted.add(tensor.storage)
            needed, asked = (
                min(bisect_left(backward, at), len(backward) - 1)
                for at in (tensor.needed_at, tensor.asked[0])
            )
            freed, done = (
                max(begun, bisect_right(backward, at) - 1)
                for begun, at in ((needed, tensor.freed_at), (asked, tensor.done_at))
            )
            beside = tensor.beside_bytes
            found.append(
                replace(
                    tensor,
                    counted=tensor.storage_bytes if first else 0,
                    saved_at=bisect_left(forward, tensor.saved_at),
                    needed_at=len(forward) + needed,
                    freed_at=len(forward) + freed,
                    asked=(len(forward) + asked, tensor.asked[1]),
                    done_at=len(forward) + done,
                    beside_bytes=None if beside is None else max(0, beside - gone),
                    # The stage has its input in a buffer, which no home frees.
                    held_by=(*tensor.held_by, USER) if tensor.storage in got else tensor.held_by,
                )
            )
        return found

    def _regions(self, layers: Sequence[Layer], tensors: Sequence[SavedTensor]) -> list[Region]:
        sizes: dict[str, int] = {}
        for tensor in tensors:
            sizes[tensor.region] = sizes.get(tensor.region, 0) + tensor.counted
        around = [
            replace(region, homes={k: v for k, v in region.homes.items() if k != "recompute"})
            for region in self.profile.regions
            if region.name in self._around
        ]
        own = [region for layer in layers for region in layer.regions]
        return [replace(region, bytes=sizes.get(region.name, 0)) for region in (*around, *own)]

    def _segments(
        self, forward: Sequence[int], backward: Sequence[int], tensors: Sequence[SavedTensor]
    ) -> list[Segment]:
        step = self.step
        order = (*forward, *backward)
        segments = [replace(step.segments[at], end_bytes=None, peak_bytes=None) for at in order]
        if not step.knows_memory:
            return segments
        gone = self._gradients[backward[0] - 1] if backward else 0
        made = [gone if at >= step.turn else 0 for at in order]
        extra, floor = (
            [max(0, beside[at] - own) for at, own in zip(order, made)] for beside in (step.extra, step.floor)
        )
        return with_memory(segments, tensors, extra, floor)


def _layer(path: Sequence[str]) -> str | None:
    """The outermost layer in a path."""
    return next((found for name in path if (found := layer_of(name))), None)


def _depth(path: Sequence[str]) -> int:
    """How many regions of a path are around its layer."""
    return next(at for at, name in enumerate(path) if layer_of(name))
