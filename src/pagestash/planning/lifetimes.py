"""A profile as a planner reads it: the life of each saved storage, and what else takes memory in each segment."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pagestash.planning.lanes import Lanes
from pagestash.planning.row_tensors import find_row_tensors
from pagestash.planning.skew import Skew
from pagestash.profiling.assign import TensorIndex
from pagestash.profiling.overhead import Overhead
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import ALLOCATED, SavedTensor
from pagestash.saved.offload.plan import Key

HOST_BOUND = 0.7
"""The step waits for the host here and there, if the host takes this part of the device's time."""


@dataclass(frozen=True, slots=True)
class Life:
    """One storage that the step allocates and holds for backward; segments as in `SavedTensor`."""

    path: tuple[str, ...]
    """Of the first tensor in it."""
    bytes: int
    valid_bytes: int
    saved_at: int
    last_saved_at: int
    needed_at: int
    freed_at: int
    beside_bytes: int | None


class MeasuredStep:
    """The measured step without a policy. See `predict.py` for `extra` and `floor`."""

    def __init__(self, profile: ProfiledStep, base_bytes: int = 0, *, lanes: Lanes | None = None) -> None:
        check(profile)
        self.profile = profile
        self.base_bytes = base_bytes
        self.count = len(profile.segments)
        self.turn = sum(segment.way == "forward" for segment in profile.segments)
        self.lanes = lanes or Lanes.of(profile)
        self.seconds = self.lanes.seconds()
        """Of each segment of the unobserved step."""
        self.overhead = profile.overhead or Overhead()
        self.hooked_lanes = self.lanes.copy()
        """With the host's time of a keeper's hooks, which it has for every saved tensor."""
        for tensor in profile.tensors:
            if tensor.kind in ALLOCATED:
                self.hooked_lanes.add(tensor.saved_at, host=self.overhead.pack)
                self.hooked_lanes.add(tensor.needed_at, host=self.overhead.unpack)
        self.index = TensorIndex(profile.tensors)
        self.segments = [replace(old, seconds=new) for old, new in zip(profile.segments, self.seconds)]
        self.lives = lives_of(profile.tensors)
        self.rows = find_row_tensors(profile)
        self.skew: Skew | None = None
        """How its rows vary; None: a pool is sized by what was measured."""
        self.knows_memory = all(segment.peak_bytes is not None for segment in profile.segments)
        self.reads_allocator = self.knows_memory and profile.device.startswith("cuda")
        changes, after = [0] * (self.count + 1), [0] * (self.count + 1)
        for life in self.lives.values():
            changes[life.saved_at] += life.bytes
            changes[life.freed_at + 1] -= life.bytes
            after[life.saved_at] += life.bytes
            after[life.freed_at] -= life.bytes
        self.extra = [0] * self.count
        self.floor = [0] * self.count
        if self.knows_memory:
            for at, (segment, alive, left) in enumerate(
                zip(profile.segments, accumulate(changes), accumulate(after))
            ):
                self.extra[at] = max(0, (segment.peak_bytes or 0) - alive)
                self.floor[at] = max(0, (segment.end_bytes or 0) - left)
        self.positions: Mapping[str, Key] = {}
        """Where in a schedule a region runs: its stage and microbatch. Empty where there is none."""
        self.at_once: Container[Key] = ()
        """Of these, those whose backward follows their forward at once."""
        self._forward: dict[str, list[int]] = {}
        self._backward: dict[str, list[int]] = {}
        for at, segment in enumerate(profile.segments):
            runs = self._forward if segment.way == "forward" else self._backward
            for name in segment.path:
                runs.setdefault(name, []).append(at)

    def exposed_overhead(self) -> float:
        """Seconds that a recomputed region costs the host, where the step waits for the host."""
        found = 0.0
        for seconds, part in (
            (self.overhead.record, slice(self.turn)),
            (self.overhead.replay, slice(self.turn, None)),
        ):
            if sum(self.lanes.host[part]) > HOST_BOUND * sum(self.lanes.device[part]):
                found += seconds
        return found

    def forward_of(self, name: str) -> Sequence[int]:
        """The segments of forward in which the region runs."""
        return self._forward.get(name, ())

    def backward_of(self, name: str) -> Sequence[int]:
        """The segments of its backward."""
        return self._backward.get(name, ())

    def where(self, at: int) -> str:
        """The region of a segment, in words."""
        return self.profile.segments[at].region or "the model itself"

    def span(self, name: str) -> tuple[int, int] | None:
        """The first and the last segment in which the region runs, in forward or backward."""
        found = (*self.forward_of(name), *self.backward_of(name))
        return (found[0], found[-1]) if found else None


def check(profile: ProfiledStep) -> None:
    """Refuse a profile whose parts do not belong together."""
    if not profile.segments or all(segment.way == "backward" for segment in profile.segments):
        raise ValueError("the profile has no segment of a forward: it was not written by ps.profile")
    last = len(profile.segments) - 1
    names = {region.name for region in profile.regions}
    for tensor in profile.tensors:
        if not 0 <= tensor.saved_at <= tensor.needed_at <= tensor.freed_at <= last:
            raise ValueError(
                f"the profile's tensor of region {tensor.region!r} is saved, needed and freed in segments "
                f"{tensor.saved_at}, {tensor.needed_at}, {tensor.freed_at} of {last + 1}: expected that order"
            )
        if tensor.region not in names:
            raise ValueError(f"the profile's tensor of region {tensor.region!r} has no such region beside it")
    if any(not segment.seconds >= 0 for segment in profile.segments):
        raise ValueError("the profile has a segment of negative or unknown time")


def lives_of(tensors: Sequence[SavedTensor]) -> dict[int, Life]:
    """The storages that the step allocates for these tensors, by number."""
    lives: dict[int, Life] = {}
    for tensor in tensors:
        known = lives.get(tensor.storage)
        if known is not None:
            lives[tensor.storage] = replace(known, last_saved_at=max(known.last_saved_at, tensor.saved_at))
        elif tensor.counted and tensor.kind in ALLOCATED:
            lives[tensor.storage] = Life(
                path=tensor.path,
                bytes=tensor.storage_bytes,
                valid_bytes=tensor.valid_bytes,
                saved_at=tensor.saved_at,
                last_saved_at=tensor.saved_at,
                needed_at=tensor.needed_at,
                freed_at=tensor.freed_at,
                beside_bytes=tensor.beside_bytes,
            )
    return lives
