"""Region by region: bytes, times, and what each home would save and cost."""

from collections.abc import Collection, Iterable, Sequence

from pagestash.profiling.link import Link
from pagestash.profiling.recorder import TensorRecorder
from pagestash.profiling.records import HomeEstimate, Region, SavedTensor, Segment


def make_regions(
    tensors: Sequence[SavedTensor], segments: Sequence[Segment], recorder: TensorRecorder, link: Link
) -> list[Region]:
    """All regions that ran or saved something, in the order in which they started."""
    paths: dict[str, tuple[str, ...]] = {}
    saved_in: dict[int, list[tuple[str, ...]]] = {}
    for tensor in tensors:
        saved_in.setdefault(tensor.saved_at, []).append(tensor.path)
    for index, segment in enumerate(segments):
        for path in (segment.path, *saved_in.get(index, ())):
            for depth, name in enumerate(path, start=1):
                paths.setdefault(name, path[:depth])
    calls: dict[str, int] = {"": 1}
    for path, count in recorder.tracker.calls.items():
        calls[path[-1]] = calls.get(path[-1], 0) + count
    modules = set(recorder.tracker.names.values())
    saved = {tensor.storage for tensor in tensors}
    seconds = {name: _seconds([s for s in segments if s.region == name]) for name in paths}
    unsaved_inputs = {name: recorder.unsaved_inputs(name, saved) for name in paths}
    taken = {number: size for found in unsaved_inputs.values() for number, size in found}
    regions = []
    for name, path in paths.items():
        own = [tensor for tensor in tensors if tensor.region == name]
        inside = [tensor for tensor in tensors if name in tensor.path]
        total = _seconds([segment for segment in segments if name in segment.path])
        inputs = tuple(sorted(recorder.inputs.get(name, set()) & saved))
        outputs = tuple(sorted(recorder.outputs.get(name, set()) & saved))
        within = name
        if own and not any(name in segments[tensor.saved_at].path for tensor in own):
            within = segments[own[0].saved_at].region  # a fused operation saved for it
        homes = estimate(own, *seconds[within], link)
        if within != name:
            cost = _seconds([segment for segment in segments if within in segment.path])[0]
            homes["recompute"] = HomeEstimate(homes["offload"].saved_bytes, cost)
        elif name and name in modules:
            homes["recompute"] = HomeEstimate(_remade(name, tensors, inputs, outputs), total[0])
        regions.append(
            Region(
                name=name,
                path=path,
                calls=calls.get(name, 0),
                within=within,
                tensors=len(own),
                bytes=sum(tensor.counted for tensor in own),
                forward_seconds=seconds[name][0],
                backward_seconds=seconds[name][1],
                total_bytes=sum(tensor.counted for tensor in inside),
                total_forward_seconds=total[0],
                total_backward_seconds=total[1],
                hidden_bytes=hidden_bytes(*seconds[within], link),
                inputs=inputs,
                outputs=outputs,
                unsaved_inputs=unsaved_inputs[name],
                # (A keeper does not know a region in which nothing was saved.)
                unsaved_outputs=recorder.unsaved_outputs(name, taken) if inside else (),
                homes=homes,
            )
        )
    return regions


def estimate(
    own: Iterable[SavedTensor], forward: float, backward: float, link: Link
) -> dict[str, HomeEstimate]:
    """Keep, stash and offload for these tensors, counted once by storage.

    A stash copies valid rows on the device, in and out. An offload costs the copy time that exceeds the
    region's own forward and backward. (`Profile.fits` estimates a whole policy, where regions share the link.)
    """
    movable = [tensor for tensor in own if tensor.movable]
    freed, valid = sum(t.counted for t in movable), sum(t.valid_bytes for t in movable)
    exposed = max(0.0, valid / link.out - forward) + max(0.0, valid / link.back - backward)
    return {
        "keep": HomeEstimate(0, 0.0),
        "stash": HomeEstimate(freed - valid, 2 * valid / link.copy),
        "offload": HomeEstimate(freed, exposed),
    }


def hidden_bytes(forward: float, backward: float, link: Link) -> int:
    """Bytes that the link can move out in `forward` seconds and back in `backward` seconds."""
    return int(min(forward * link.out, backward * link.back))


def _remade(
    name: str, tensors: Sequence[SavedTensor], inputs: Collection[int], outputs: Collection[int]
) -> int:
    """Bytes that recomputing the region would free: what is saved in it, except its inputs and what others hold,
    and its output, if only saved tensors hold that."""
    inside = {tensor.storage for tensor in tensors if name in tensor.path}
    outside = {tensor.storage for tensor in tensors if name not in tensor.path}
    freed = 0
    for tensor in tensors:
        if not tensor.movable or tensor.storage in inputs:
            continue
        dropped = tensor.storage in inside and tensor.storage not in outside
        if dropped or tensor.storage in outputs:
            freed += tensor.counted
    return freed


def _seconds(chosen: Iterable[Segment]) -> tuple[float, float]:
    """Seconds of forward and of backward in these segments."""
    seconds = {"forward": 0.0, "backward": 0.0}
    for segment in chosen:
        seconds[segment.way] += segment.seconds
    return seconds["forward"], seconds["backward"]
