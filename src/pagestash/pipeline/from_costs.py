"""A profile made of costs, for a model that was never measured: each layer is one region with two saved tensors."""

from collections.abc import Sequence
from dataclasses import replace

from pagestash.pipeline.costs import LayerCost
from pagestash.profiling.link import Link
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import HomeEstimate, Region, SavedTensor, Segment


def profile_of_costs(
    costs: Sequence[LayerCost], *, hidden_bytes: int, link: Link, device: str = "cuda"
) -> ProfiledStep:
    """The step of one microbatch whose layers cost so much; times are in seconds.

    `hidden_bytes` is what a layer hands to the next. Of what a layer saves, so much is its input: recompute holds
    it. A layer is kept, offloaded or recomputed as a whole, and needs no workspace. `costs` have weights, gradients
    and optimizer state as one number, so the profile's weights are that number, and it has no gradients.
    """
    count = len(costs)
    tensors: list[SavedTensor] = []
    regions = [_region("", ("",), 0, 0.0, 0.0)]
    for at, cost in enumerate(costs):
        path = ("", cost.name)
        taken = min(hidden_bytes, cost.activations) if at else 0
        given = min(hidden_bytes, costs[at + 1].activations) if at + 1 < count else 0
        back = 2 * count - 1 - at
        for storage, size in ((2 * at, taken), (2 * at + 1, cost.activations - taken)):
            if size:
                tensors.append(_saved(path, storage, size, device, at, back))
        region = _region(cost.name, path, cost.activations, cost.forward, cost.backward)
        region.homes["recompute"] = HomeEstimate(cost.activations - taken, cost.forward)
        inputs, outputs = ((2 * at,) if taken else ()), ((2 * at + 2,) if given else ())
        regions.append(replace(region, inputs=inputs, outputs=outputs))
    ends = _alive(tensors, 2 * count)
    segments = [Segment(("", cost.name), "forward", cost.forward) for cost in costs]
    segments += [Segment(("", cost.name), "backward", cost.backward) for cost in reversed(costs)]
    return ProfiledStep(
        device=device,
        link=link,
        tensors=tensors,
        regions=regions,
        segments=[
            Segment(segment.path, segment.way, segment.seconds, end_bytes=end, peak_bytes=peak)
            for segment, (end, peak) in zip(segments, ends)
        ],
        plain_seconds=sum(cost.time for cost in costs),
        model_bytes=sum(cost.parameters for cost in costs),
        gradient_bytes=0,
        parameter_bytes={cost.name: cost.parameters for cost in costs},
    )


def _alive(tensors: Sequence[SavedTensor], count: int) -> list[tuple[int, int]]:
    """Bytes at the end of each segment, and the most in it."""
    found = []
    for at in range(count):
        there = [tensor for tensor in tensors if tensor.saved_at <= at <= tensor.freed_at]
        found.append((sum(t.counted for t in there if t.freed_at > at), sum(t.counted for t in there)))
    return found


def _saved(path: tuple[str, ...], storage: int, size: int, device: str, at: int, back: int) -> SavedTensor:
    return SavedTensor(
        region=path[-1],
        path=path,
        shape=(size,),
        dtype="float",
        device=device,
        kind="activation",
        bytes=size,
        storage=storage,
        storage_bytes=size,
        counted=size,
        valid_bytes=size,
        held_by=(),
        saved_at=at,
        needed_at=back,
        freed_at=back,
    )


def _region(name: str, path: tuple[str, ...], size: int, forward: float, backward: float) -> Region:
    return Region(
        name=name,
        path=path,
        calls=1,
        within=name,
        tensors=2,
        bytes=size,
        forward_seconds=forward,
        backward_seconds=backward,
        total_bytes=size,
        total_forward_seconds=forward,
        total_backward_seconds=backward,
        hidden_bytes=0,
        homes={
            home: HomeEstimate(size if home == "offload" else 0, 0.0) for home in ("keep", "stash", "offload")
        },
    )
