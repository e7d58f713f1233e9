"""Whether the copies of a policy's offload hide behind the compute of a measured step.

The step is simulated by the keeper's own rules: its plan (`saved/offload/plan.py`) decides which groups stay,
its window (`saved/offload/window.py`) what leaves and what is fetched at which event. Only time is modelled
here: compute takes its measured time, the link moves one copy at a time in each direction, and compute waits
when the window says so.

A keeper may differ from this in three points, which a profile does not know:

- The headroom: where memory is far below its peak, a keeper lets copies out take longer, so it waits no longer.
- Which part of a storage a tensor covers. Here the whole storage counts, once; a keeper moves the range that a
  region's tensors cover, and each thin slice (less than half of what it spans) by itself.
- With a `fraction` below 1, which tensors leave: here that part of each tensor does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from pagestash.policy import HomeName, Policy
from pagestash.profiling.assign import rule_of
from pagestash.profiling.link import Link
from pagestash.profiling.records import SavedTensor, Segment
from pagestash.saved.offload.plan import Event, GroupBytes, Key, OffloadPlan, make_plan
from pagestash.saved.offload.window import Decision, Window, WindowGroup

STEPS = 100
"""Fractions to try: every hundredth."""
UNSEEN = 1e-3
"""Part of a step: a shorter wait is within the noise."""


@dataclass(frozen=True, slots=True)
class Fit:
    """An estimate for one policy: do its copies hide?

    They hide if compute waits for none: not in forward, for copies out whose memory is needed, and not in backward,
    for copies back.
    """

    fits: bool
    moved_bytes: int
    """Bytes that the keeper copies, also of a tensor that a later region keeps: it was copied before."""
    staying_bytes: int
    """Bytes under an offload rule that are needed again so soon that they stay on the device."""
    needed_seconds: float
    """Link time of the moved bytes, in the direction with less time to spare."""
    available_seconds: float
    """Time available in that direction: out, from the end of the first region to the end of forward; back, from
    there to the last need."""
    exposed_seconds: float
    """How long compute would wait."""
    fraction: float
    """The largest fraction of the policy's bytes that would hide, in hundredths; 1.0 if all do."""


@dataclass(frozen=True, slots=True)
class Move:
    """One group: when its region ends, when backward first needs it, and when backward is done with it."""

    key: Key
    ready: float
    needed: float
    done: float
    bytes: float
    """Bytes copied each way."""
    device_bytes: int
    window: int | None
    """Its rule's `prefetch_bytes`."""
    asked: tuple[float, ...] = ()
    """When backward needs each of its tensors."""


def fit(
    policy: Policy,
    tensors: Sequence[SavedTensor],
    homes: Sequence[HomeName],
    segments: Sequence[Segment],
    link: Link,
) -> Fit:
    """Simulate the copies of one step; if they do not hide, find the fraction that would.

    `homes` are those that a keeper gives the tensors when they are saved (`assign_when_saved`).
    """
    step = sum(segment.seconds for segment in segments)
    turn = sum(segment.seconds for segment in segments if segment.way == "forward")
    moves = moves_of(policy, tensors, homes, segments)
    plan = _plan_of(moves)
    going = [move for move in moves if move.key not in plan.stays]

    def waited(fraction: float) -> float:
        return _Step(plan, link, fraction).play(moves)

    def hides(fraction: float) -> bool:
        return waited(fraction) <= UNSEEN * step and bool(going or not moves)

    moved = sum(move.bytes for move in going)
    ways = [(0.0, 0.0)]
    if going:
        first, last = min(move.ready for move in going), max(move.needed for move in going)
        ways = [(moved / link.out, turn - first), (moved / link.back, last - turn)]
    needed, available = max(ways, key=lambda way: way[0] - way[1])
    whole = Fit(
        fits=hides(1.0),
        moved_bytes=round(moved),
        staying_bytes=round(sum(move.bytes for move in moves) - moved),
        needed_seconds=needed,
        available_seconds=available,
        exposed_seconds=waited(1.0),
        fraction=1.0,
    )
    if whole.fits:
        return whole
    smaller = (number / STEPS for number in range(STEPS - 1, 0, -1))
    return replace(whole, fraction=next((part for part in smaller if hides(part)), 0.0))


def moves_of(
    policy: Policy, tensors: Sequence[SavedTensor], homes: Sequence[HomeName], segments: Sequence[Segment]
) -> list[Move]:
    """The groups that leave, each storage once. A region's tensors leave when it ends, and return together."""
    ends = list(accumulate(segment.seconds for segment in segments))
    groups: dict[tuple[str, int], list[SavedTensor]] = {}
    seen: set[int] = set()
    for tensor, home in zip(tensors, homes):
        if home == "offload" and tensor.storage not in seen:
            seen.add(tensor.storage)
            _, name = rule_of(policy, tensor.path)
            groups.setdefault((name, _last_segment(segments, tensor.saved_at, name)), []).append(tensor)
    moves = []
    for (name, last), group in groups.items():
        rule = policy.rule_for(name)
        assert rule is not None
        asked = tuple(sorted(ends[tensor.needed_at - 1] for tensor in group))
        moves.append(
            Move(
                key=(name, last),
                ready=ends[last],
                needed=asked[0],
                done=max(ends[tensor.freed_at] for tensor in group),
                bytes=rule.fraction * sum(tensor.valid_bytes for tensor in group),
                device_bytes=sum(tensor.storage_bytes for tensor in group),
                window=rule.prefetch_bytes,
                asked=asked,
            )
        )
    return moves


def _last_segment(segments: Sequence[Segment], start: int, name: str) -> int:
    """The last segment of the region that was running in segment `start`."""
    if name not in segments[start].path:
        name = segments[start].region  # claimed by a fused operation: both regions end together
    last = start
    while (
        last + 1 < len(segments) and segments[last + 1].way == "forward" and name in segments[last + 1].path
    ):
        last += 1
    return last


def _plan_of(moves: Sequence[Move]) -> OffloadPlan:
    groups = {move.key: GroupBytes(max(1, int(move.bytes)), move.device_bytes, move.window) for move in moves}
    puts: list[Event] = [("put", move.key) for move in sorted(moves, key=lambda move: move.ready)]
    gets: list[Event] = [("get", move.key) for move in sorted(moves, key=lambda move: move.needed)]
    return make_plan([*puts, *gets], groups)


class _Step:
    """One step in which `fraction` of the bytes are copied: the window decides, this class keeps the time."""

    def __init__(self, plan: OffloadPlan, link: Link, fraction: float) -> None:
        self._window = Window(plan)
        self._link = link
        self._fraction = fraction
        self._now = 0.0
        self._waited = 0.0
        self._out_free = self._back_free = 0.0
        self._copies: dict[Key, float] = {}  # bytes
        self._gone: dict[Key, float] = {}  # when the copy out ends
        self._here: dict[Key, float] = {}  # when the copy back ends
        self._leaving: list[Key] = []

    def play(self, moves: Sequence[Move]) -> float:
        """Seconds that compute waits."""
        self._copies = {move.key: self._fraction * move.bytes for move in moves}
        held: dict[Key, WindowGroup] = {}
        for at, kind, move in _events(moves):
            self._now = at + self._waited
            if kind == "put":
                group = held[move.key] = self._put(move)
                self._see_what_has_left()
                self._carry_out(self._window.after_put(group))
            elif kind == "get":
                group = held[move.key]
                self._see_what_has_left()
                self._carry_out(self._window.get(group, kept=not group.away_bytes))
            else:
                self._window.drop(held[move.key])
        return self._waited

    def _put(self, move: Move) -> WindowGroup:
        size, key = move.device_bytes, move.key
        if self._window.stays(key):
            group = WindowGroup(key, size, kept_bytes=size)
        else:
            group = WindowGroup(key, size, away_bytes=size, travelling_bytes=size, leaving_bytes=size)
            self._out_free = max(self._out_free, self._now) + self._copies[key] / self._link.out
            self._gone[key] = self._out_free
            self._leaving.append(key)
        self._window.put(group)
        return group

    def _see_what_has_left(self) -> None:
        while self._leaving and self._gone[self._leaving[0]] <= self._now:
            self._leaving.pop(0)
            self._window.gone()

    def _carry_out(self, decisions: Iterator[Decision]) -> None:
        for what, group in decisions:
            key = group.key
            if what == "let go":
                self._wait_until(self._gone[self._leaving.pop(0)])
            elif what == "fetch":
                begins = max(self._now, self._gone[key], self._back_free)
                self._here[key] = self._back_free = begins + self._copies[key] / self._link.back
            else:
                self._wait_until(self._here[key])

    def _wait_until(self, then: float) -> None:
        wait = max(0.0, then - self._now)
        self._waited += wait
        self._now += wait


def _events(moves: Sequence[Move]) -> list[tuple[float, Literal["put", "get", "drop"], Move]]:
    """The events of all groups in time; at the same time first puts, then drops, then gets."""
    found: list[tuple[float, int, Literal["put", "get", "drop"], Move]] = []
    for move in moves:
        asked = move.asked or (move.needed,)
        found.append((move.ready, 0, "put", move))
        found += [(at, 2, "get", move) for at in asked]
        found.append((move.done, 1 if move.done > max(asked) else 3, "drop", move))
    return [(at, kind, move) for at, _, kind, move in sorted(found, key=lambda event: event[:2])]
