"""Whether the bytes that a policy offloads hide behind the compute of the step that was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pagestash.policy import HomeName, Policy
from pagestash.profiling.assign import rule_of
from pagestash.profiling.link import Link
from pagestash.profiling.records import SavedTensor, Segment

STEPS = 100
"""The fractions that are tried: every hundredth."""


@dataclass(frozen=True, slots=True)
class Fit:
    """An estimate for one policy: do its offloaded bytes hide?

    They do when all of them have left before forward ends (or their memory would still be taken at the peak), and
    each is back before backward asks for it.
    """

    fits: bool
    moved_bytes: int
    staying_bytes: int
    """Offloaded by rule, but saved so close to the turn that no copy would be done in time: they stay."""
    needed_seconds: float
    """What the link needs for the moved bytes, in the direction that has less to spare."""
    available_seconds: float
    """What it has there: out, from the first tensor saved to the end of forward; back, from there to the last
    one needed."""
    exposed_seconds: float
    """How long backward would wait."""
    fraction: float
    """The largest fraction (in hundredths) of the policy's bytes that would hide; 1.0 where all do."""


@dataclass(frozen=True, slots=True)
class _Move:
    """One storage: when it may leave, when it must be back, and the bytes that travel."""

    ready: float
    needed: float
    bytes: float


def fit(
    policy: Policy,
    tensors: Sequence[SavedTensor],
    homes: Sequence[HomeName],
    segments: Sequence[Segment],
    link: Link,
) -> Fit:
    """Play the copies of one step against its timeline."""
    turn = sum(segment.seconds for segment in segments if segment.way == "forward")
    moves = _moves(policy, tensors, homes, segments)
    whole = _play(moves, 1.0, turn, link)
    if whole.fits:
        return whole
    hidden = (step / STEPS for step in range(STEPS - 1, 0, -1) if _play(moves, step / STEPS, turn, link).fits)
    return replace(whole, fraction=next(hidden, 0.0))


def _moves(
    policy: Policy, tensors: Sequence[SavedTensor], homes: Sequence[HomeName], segments: Sequence[Segment]
) -> list[_Move]:
    """What leaves, once for each storage. A region's tensors leave when it ends, and return together."""
    ends = list(accumulate(segment.seconds for segment in segments))
    groups: dict[tuple[str, int], dict[int, SavedTensor]] = {}
    shares: dict[tuple[str, int], float] = {}
    seen: set[int] = set()
    for tensor, home in zip(tensors, homes):
        if home == "offload" and tensor.storage not in seen:
            seen.add(tensor.storage)
            rule, name = rule_of(policy, tensor.path)
            assert rule is not None
            key = name, _last_segment(segments, tensor.saved_at, name)
            groups.setdefault(key, {})[tensor.storage] = tensor
            shares[key] = rule.fraction
    moves = []
    for key, group in groups.items():
        needed = min(ends[tensor.needed_at - 1] for tensor in group.values())
        moves += [_Move(ends[key[1]], needed, shares[key] * t.valid_bytes) for t in group.values()]
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


def _play(moves: Sequence[_Move], fraction: float, turn: float, link: Link) -> Fit:
    """One step in which `fraction` of each move's bytes travels, in the order of saving and of need."""
    going, staying = [], 0.0
    for move in moves:
        out, back = fraction * move.bytes / link.out, fraction * move.bytes / link.back
        if move.ready + out > turn or turn + back > move.needed:
            staying += fraction * move.bytes
        else:
            going.append((move, out, back))
    gone, left = 0.0, {}
    for move, out, _ in sorted(going, key=lambda item: item[0].ready):
        gone = max(gone, move.ready) + out
        left[id(move)] = gone
    there, waited = turn, 0.0
    for move, _, back in sorted(going, key=lambda item: item[0].needed):
        there = max(there, left[id(move)]) + back
        waited = max(waited, there - move.needed)
    moved = sum(fraction * move.bytes for move, _, _ in going)
    ways = [(0.0, 0.0)]
    if going:
        first, last = min(move.ready for move, _, _ in going), max(move.needed for move, _, _ in going)
        ways = [(moved / link.out, turn - first), (moved / link.back, last - turn)]
    needed, available = max(ways, key=lambda way: way[0] - way[1])
    return Fit(
        fits=gone <= turn and waited <= 0 and bool(going or not moves),
        moved_bytes=round(moved),
        staying_bytes=round(staying),
        needed_seconds=needed,
        available_seconds=available,
        exposed_seconds=waited,
        fraction=fraction,
    )
