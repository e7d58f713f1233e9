"""Whether the bytes that a policy offloads hide behind the compute of the step that was measured.

The copies of one step are played against its timeline, by the keeper's own rules: which groups stay on the device,
how many bytes may be on their way out, and when a group may be fetched (`saved/order.py`, `saved/offload.py`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pagestash.policy import HomeName, Policy
from pagestash.profiling.assign import rule_of
from pagestash.profiling.link import Link
from pagestash.profiling.records import SavedTensor, Segment
from pagestash.saved.order import Event, Group, Key, Plan, make_plan

STEPS = 100
"""The fractions that are tried: every hundredth."""
UNSEEN = 1e-3
"""Of a step: a wait that is shorter is lost in its noise."""


@dataclass(frozen=True, slots=True)
class Fit:
    """An estimate for one policy: do its offloaded bytes hide?

    They do when compute waits for no copy: neither in forward, for bytes that have not left when others need
    their room, nor in backward, for bytes that are not back.
    """

    fits: bool
    moved_bytes: int
    staying_bytes: int
    """Offloaded by rule, but needed again so soon that the keeper leaves them on the device."""
    needed_seconds: float
    """What the link needs for the moved bytes, in the direction that has less to spare."""
    available_seconds: float
    """What it has there: out, from the first region's end to the end of forward; back, from there to the last
    need."""
    exposed_seconds: float
    """How long compute would wait."""
    fraction: float
    """The largest fraction (in hundredths) of the policy's bytes that would hide; 1.0 where all do."""


@dataclass(frozen=True, slots=True)
class Move:
    """What one region puts away together: when, when backward asks for it first, and when it is done with it."""

    key: Key
    ready: float
    needed: float
    done: float
    bytes: float
    """That travel each way."""
    room: int
    """On the device."""
    ahead: int | None


def fit(
    policy: Policy,
    tensors: Sequence[SavedTensor],
    homes: Sequence[HomeName],
    segments: Sequence[Segment],
    link: Link,
) -> Fit:
    """Play the copies of one step; where they do not hide, find the fraction of them that would."""
    step = sum(segment.seconds for segment in segments)
    turn = sum(segment.seconds for segment in segments if segment.way == "forward")
    moves = moves_of(policy, tensors, homes, segments)
    groups = {move.key: Group(max(1, int(move.bytes)), move.room, move.ahead) for move in moves}
    puts: list[Event] = [("put", move.key) for move in sorted(moves, key=lambda move: move.ready)]
    gets: list[Event] = [("get", move.key) for move in sorted(moves, key=lambda move: move.needed)]
    plan = make_plan([*puts, *gets], groups)
    going = [move for move in moves if move.key not in plan.stays]

    def waited(fraction: float) -> float:
        return _play(moves, plan, fraction, link)

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
    """What leaves, each storage once. A region's tensors leave when it ends, and return together."""
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
        moves.append(
            Move(
                key=(name, last),
                ready=ends[last],
                needed=min(ends[tensor.needed_at - 1] for tensor in group),
                done=max(ends[tensor.freed_at] for tensor in group),
                bytes=rule.fraction * sum(tensor.valid_bytes for tensor in group),
                room=sum(tensor.storage_bytes for tensor in group),
                ahead=rule.prefetch_bytes,
            )
        )
    return moves


def _last_segment(segments: Sequence[Segment], start: int, name: str) -> int:
    """The segment with which the region ends that was running in `start`."""
    if name not in segments[start].path:
        name = segments[start].region  # a fused operation saved for another: they end together
    last = start
    while (
        last + 1 < len(segments) and segments[last + 1].way == "forward" and name in segments[last + 1].path
    ):
        last += 1
    return last


def _play(moves: Sequence[Move], plan: Plan, fraction: float, link: Link) -> float:
    """Seconds that compute waits in a step in which `fraction` of the bytes travel."""
    waited, left = _forward(moves, plan, fraction, link)
    return waited + _backward(moves, plan, fraction, link, waited, left)


def _forward(
    moves: Sequence[Move], plan: Plan, fraction: float, link: Link
) -> tuple[float, dict[Key, float]]:
    """Seconds waited, and when each group has left."""
    order = sorted(moves, key=lambda move: move.ready)
    leaving: deque[tuple[float, int]] = deque()
    left: dict[Key, float] = {}
    staying, gone, waited = 0, 0.0, 0.0
    for move in order:
        now = move.ready + waited
        if move.key in plan.stays:
            staying += move.room
        else:
            gone = left[move.key] = max(gone, now) + fraction * move.bytes / link.out
            leaving.append((gone, move.room))
        limit = plan.leaving_limit(move.key, staying)
        while sum(room for end, room in leaving if end > now) > limit:
            end, _ = leaving.popleft()
            waited += max(0.0, end - now)
            now = max(now, end)
    return waited, left


def _backward(
    moves: Sequence[Move],
    plan: Plan,
    fraction: float,
    link: Link,
    late: float,
    left: dict[Key, float],
) -> float:
    """Seconds waited, in a backward that begins `late`."""
    order = sorted(moves, key=lambda move: move.needed)
    dropped: dict[Key, float] = {}
    # Nothing is fetched while groups are still to be put: they need the window.
    there = max((move.ready for move in moves), default=0.0) + late
    waited = 0.0
    for index, move in enumerate(order):
        asked = move.needed + late + waited
        for other in order:
            if other.done <= move.needed:
                dropped.setdefault(other.key, other.done + late + waited)
        if move.key in plan.stays:
            continue
        room, first = 0, index + 1
        while first and room + order[first - 1].room <= plan.fetch_limit(move.key):
            first -= 1
            room += order[first].room
        # It may come when the group before those that the window holds is gone; at the latest when it is asked for.
        allowed = min(asked, dropped.get(order[first - 1].key, asked)) if 0 < first <= index else 0.0
        if first > index:
            allowed = asked  # it is larger than its window
        there = max(there, left[move.key], allowed) + fraction * move.bytes / link.back
        waited += max(0.0, there - asked)
    return waited
