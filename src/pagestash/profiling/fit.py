"""Whether the copies of a policy's offload hide behind the compute of a measured step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling.copies import plan_of, play
from pagestash.profiling.groups import Move, Timeline, moves_of
from pagestash.profiling.link import Link
from pagestash.profiling.records import SavedTensor, Segment

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
    """The largest `fraction` (times that of each rule) with which the copies hide, in hundredths; 1.0 if all do."""


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
    seconds = [segment.seconds for segment in segments]
    step = sum(seconds)
    timeline = Timeline(segments)
    turn = sum(segment.seconds for segment in segments if segment.way == "forward")

    def played(fraction: float) -> tuple[list[Move], list[Move], float]:
        """The groups, those that leave, and how long compute waits."""
        moves = moves_of(_Part(policy, fraction), tensors, homes, timeline)
        plan = plan_of(moves)
        going = [move for move in moves if move.key not in plan.stays]
        return moves, going, play(moves, plan, seconds, link).waited

    def hides(moves: Sequence[Move], going: Sequence[Move], waited: float) -> bool:
        return waited <= UNSEEN * step and bool(going or not moves)

    moves, going, waited = played(1.0)
    moved = sum(move.bytes for move in going)
    ways = [(0.0, 0.0)]
    if going:
        first, last = min(move.ready for move in going), max(move.needed for move in going)
        ways = [(moved / link.out, turn - first), (moved / link.back, last - turn)]
    needed, available = max(ways, key=lambda way: way[0] - way[1])
    whole = Fit(
        fits=hides(moves, going, waited),
        moved_bytes=moved,
        staying_bytes=sum(move.bytes for move in moves) - moved,
        needed_seconds=needed,
        available_seconds=available,
        exposed_seconds=waited,
        fraction=1.0,
    )
    if whole.fits:
        return whole
    smaller = (number / STEPS for number in range(STEPS - 1, 0, -1))
    return replace(whole, fraction=next((part for part in smaller if hides(*played(part))), 0.0))


class _Part:
    """The same rules, of whose bytes a part leaves."""

    def __init__(self, policy: Policy, fraction: float) -> None:
        self._policy, self._fraction = policy, fraction

    def rule_for(self, name: str) -> Rule | None:
        rule = self._policy.rule_for(name)
        if rule is None or not rule.offloads:
            return rule
        return replace(rule, fraction=self._fraction * rule.fraction)
