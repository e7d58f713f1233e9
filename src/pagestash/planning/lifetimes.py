"""A profile as a planner reads it: the life of each saved storage, and what else takes memory in each segment."""

from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

from pagestash.planning.fused import permuted_bytes
from pagestash.planning.lanes import HOST_BOUND, SLOW_STEPS, SLOWER_LINK, Lanes
from pagestash.planning.row_tensors import find_row_tensors
from pagestash.planning.skew import Skew
from pagestash.profiling.assign import TensorIndex
from pagestash.profiling.groups import Timeline
from pagestash.profiling.levels import Levels
from pagestash.profiling.link import Link
from pagestash.profiling.overhead import Overhead
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import ALLOCATED, Region, SavedTensor, Segment
from pagestash.saved.offload.plan import Key


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
    request: int


class MeasuredStep:
    """The measured step without a policy. See `predict.py` for `extra` and `floor`."""

    def __init__(
        self, profile: ProfiledStep, base_bytes: int = 0, *, graphed: bool = False, loops: bool = False
    ) -> None:
        """`loops`: steps follow each other, and the loop waits for none (`lanes.py`)."""
        check(profile)
        cuda = profile.device.startswith("cuda")
        # (On a CPU a `GraphedStep` runs eagerly, and there is no device to be ahead of.)
        self.graphed = graphed and cuda
        """Whether it will run as a CUDA graph, in which the host launches nothing."""
        self.loops = loops and cuda and not graphed
        """Whether steps follow each other, and the loop waits for none."""
        self.ahead = self.loops and not profile.host_waits
        """Whether the host is ahead of the device then: a step may wait by itself."""
        self.waits = cuda and not (self.graphed or self.loops)
        """Whether the loop waits for each."""
        self.sees_copies = not (self.graphed or self.ahead)
        """Whether a keeper sees that a copy out is over: not while a graph is captured, nor ahead of the device."""
        self.profile = profile
        self.base_bytes = base_bytes
        self.count = len(profile.segments)
        self.turn = sum(segment.way == "forward" for segment in profile.segments)
        self.lanes = Lanes.of_graph(profile) if self.graphed else Lanes.of(profile, loops=self.loops)
        self.seconds = self.lanes.seconds()
        """Of each segment of the unobserved step."""
        self.overhead = Overhead() if self.graphed else profile.overhead or Overhead()
        """What a keeper costs the host."""
        self._inside: dict[str, int] = {}
        for region in profile.regions:
            for name in region.path[:-1]:
                self._inside[name] = self._inside.get(name, 0) + 1
        self.read_tensors()
        self.skew: Skew | None = None
        """How its rows vary; None: a pool is sized by what was measured."""
        self.knows_memory = all(segment.peak_bytes is not None for segment in profile.segments)
        self.reads_allocator = self.knows_memory and profile.device.startswith("cuda")
        self.extra = [0] * self.count
        self.floor = [0] * self.count
        if self.knows_memory:
            saved = levels_of(self.lives, self.count)
            for at, (segment, alive, left) in enumerate(zip(profile.segments, saved.during(), saved.after())):
                self.extra[at] = max(0, (segment.peak_bytes or 0) - alive)
                self.floor[at] = max(0, (segment.end_bytes or 0) - left)
        self.positions: Mapping[str, Key] = {}
        """Where in a schedule a region runs: its stage and microbatch. Empty where there is none."""
        self.at_once: Container[Key] = ()
        """Of these, those whose backward follows their forward at once."""
        self.halves: Mapping[int, tuple[int, int]] = {}
        """Of storages that a split backward needs twice: when its first half is done, when its second begins."""
        self._forward: dict[str, list[int]] = {}
        self._backward: dict[str, list[int]] = {}
        self._calls: dict[str, list[list[int]]] = {}
        for at, segment in enumerate(profile.segments):
            runs = self._forward if segment.way == "forward" else self._backward
            for name in segment.path:
                runs.setdefault(name, []).append(at)

    def read_tensors(self) -> None:
        """What follows from the profile's tensors alone."""
        self.index = TensorIndex(self.profile.tensors)
        self.lives = lives_of(self.profile.tensors)
        self.held = [
            (at, tensor.storage, tensor.elsewhere)
            for at, tensor in enumerate(self.profile.tensors)
            if tensor.storage in self.lives
        ]
        """Which tensors are of storages that the step allocates, those, and whether others hold them, too."""
        self.rows = find_row_tensors(self.profile)
        self.permuted = permuted_bytes(self.profile)
        """By region of a fused layer: workspace of its backward, if its tensor was not saved."""

    def part(self, tensors: list[SavedTensor], regions: list[Region]) -> "MeasuredStep":
        """The same step with these tensors and regions alone, for the sums of a policy."""
        found = copy(self)
        found.profile = replace(self.profile, tensors=tensors, regions=regions)
        found.read_tensors()
        return found

    @cached_property
    def segments(self) -> list[Segment]:
        """Those of the profile, with the seconds of the unobserved step."""
        return [replace(old, seconds=new) for old, new in zip(self.profile.segments, self.seconds)]

    @cached_property
    def timeline(self) -> Timeline:
        """The same, for `moves_of`."""
        return Timeline(self.profile.segments, self.seconds)

    @property
    def slow_link(self) -> Link:
        """The link as it is at times (`lanes.py`)."""
        return self.profile.link.at(SLOWER_LINK)

    @cached_property
    def exposed_overhead(self) -> float:
        """Seconds that a recomputed region costs on average, where the step waits for the host, quick or slow."""
        cost = self.overhead
        return cost.record * self._exposed(slice(self.turn)) + cost.replay * self._exposed(
            slice(self.turn, None)
        )

    @cached_property
    def exposed_launches(self) -> float:
        """By how much a second more of a host that is ahead makes the step longer on average.

        What it loses in forward it can make up for in backward.
        """
        return self._exposed(slice(None))

    def _exposed(self, way: slice) -> float:
        """By how much a second more of the host makes the step longer on average, in forward or backward.

        Nothing where the host takes less than `HOST_BOUND` of the device's time.
        """
        host, device = sum(self.lanes.host[way]), sum(self.lanes.device[way])
        steps = ((1.0, 1 - SLOW_STEPS), (self.lanes.slower, SLOW_STEPS))
        return sum(part * slower for slower, part in steps if slower * host > HOST_BOUND * device)

    def record_seconds(self, name: str) -> float:
        """What a recomputed region costs the host in forward."""
        return self.overhead.record + self._inside.get(name, 0) * self.overhead.record_module

    def replay_seconds(self, name: str) -> float:
        """The same in backward, beside the region's own forward and the tensors that it saves."""
        return self.overhead.replay + self._inside.get(name, 0) * self.overhead.replay_module

    def forward_of(self, name: str) -> Sequence[int]:
        """The segments of forward in which the region runs."""
        return self._forward.get(name, ())

    def calls_of(self, name: str) -> Sequence[Sequence[int]]:
        """The same, call by call: a module may run in several places."""
        found = self._calls.get(name)
        if found is None:
            found = self._calls[name] = _runs(self.forward_of(name))
        return found

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


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers that follow each other, together."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


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
    if not any(segment.seconds for segment in profile.segments):
        raise ValueError("the profile's segments take no time: it was not written by ps.profile")


def levels_of(lives: Mapping[int, Life], count: int) -> Levels:
    """Their bytes over a step of so many segments."""
    found = Levels(count)
    for life in lives.values():
        found.add(life.saved_at, life.freed_at, life.bytes)
    return found


def with_memory(
    segments: Sequence[Segment],
    tensors: Sequence[SavedTensor],
    extra: Sequence[int],
    floor: Sequence[int],
) -> list[Segment]:
    """The segments with the memory that these tensors take, and what is beside them."""
    saved = levels_of(lives_of(tensors), len(segments))
    return [
        replace(segment, end_bytes=left + beside, peak_bytes=alive + most)
        for segment, alive, left, most, beside in zip(segments, saved.during(), saved.after(), extra, floor)
    ]


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
                request=tensor.request,
            )
    return lives
