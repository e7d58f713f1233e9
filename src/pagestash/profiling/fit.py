"""Whether the copies of a policy's offload hide behind the compute of a measured step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagestash.policy import HomeName, Policy, Rule
from pagestash.profiling.assign import UNTOUCHED, TensorIndex, TensorRules
from pagestash.profiling.copies import plan_of, play
from pagestash.profiling.groups import Move, Timeline, moves_of
from pagestash.profiling.link import Link
from pagestash.profiling.records import SavedTensor, Segment
from pagestash.saved.reasons import (
    FOR_REPLAY,
    NO_EXPECTED_ROWS,
    NO_FRACTION,
    ONLY_WEIGHTS,
    WITHIN_WINDOW,
    kept_by,
    too_small,
)

STEPS = 100
"""Fractions to try: every hundredth."""
UNSEEN = 1e-3
"""Part of a step: a shorter wait is within the noise."""


@dataclass(frozen=True, slots=True)
class Fit:
    """An estimate for one policy: do its copies hide?

    They hide if compute waits for none: not in forward, for copies out whose memory is needed, and not in backward,
    for copies back. A policy of which nothing moves does not fit, unless no rule of it offloads.
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
    """The largest `fraction` (times that of each rule) with which the copies hide, in hundredths: 1.0 if all do,
    0.0 if nothing moves."""
    unmoved: dict[str, str]
    """Rules that offload and move nothing: why, by their patterns."""


def fit(
    policy: Policy,
    index: TensorIndex,
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
        moves = moves_of(_Part(policy, fraction), index.tensors, homes, timeline)
        plan = plan_of(moves)
        going = [move for move in moves if move.key not in plan.stays]
        return moves, going, play(moves, plan, seconds, link).waited

    def hides(going: Sequence[Move], waited: float) -> bool:
        return bool(going) and waited <= UNSEEN * step

    moves, going, waited = played(1.0)
    moved = sum(move.bytes for move in going)
    offloading = [rule for rule in policy.rules if rule.offloads]
    ways = [(0.0, 0.0)]
    if going:
        first, last = min(move.ready for move in going), max(move.needed for move in going)
        ways = [(moved / link.out, turn - first), (moved / link.back, last - turn)]
    needed, available = max(ways, key=lambda way: way[0] - way[1])
    whole = Fit(
        fits=hides(going, waited) or not offloading,
        moved_bytes=moved,
        staying_bytes=sum(move.bytes for move in moves) - moved,
        needed_seconds=needed,
        available_seconds=available,
        exposed_seconds=waited,
        fraction=1.0,
        unmoved=_unmoved(offloading, index.rules(policy), going, index.tensors, homes),
    )
    if whole.fits:
        return whole
    smaller = (number / STEPS for number in range(STEPS - 1, 0, -1)) if going else ()
    return replace(whole, fraction=next((part for part in smaller if hides(*played(part)[1:])), 0.0))


def _unmoved(
    offloading: Sequence[Rule],
    rules: TensorRules,
    going: Sequence[Move],
    tensors: Sequence[SavedTensor],
    homes: Sequence[HomeName],
) -> dict[str, str]:
    """The rules of which nothing is `going`, and why; `rules` and `homes` are those of the tensors."""
    leaving = {storage for move in going for storage in move.leaving}
    leaving |= {part.storage for move in going for part in move.slices}
    keeper: dict[int, int] = {}
    """By storage: the first of its tensors that is kept."""
    for at, (tensor, home) in enumerate(zip(tensors, homes)):
        if home == "keep":
            keeper.setdefault(tensor.storage, at)
    found: dict[str, str] = {}
    for rule in offloading:
        own = [at for at, (each, _) in enumerate(rules) if each == rule and tensors[at].kind not in UNTOUCHED]
        if any(homes[at] == "offload" and tensors[at].storage in leaving for at in own):
            continue
        large = [at for at in own if tensors[at].bytes >= rule.least_bytes]
        if not own:
            why = ONLY_WEIGHTS
        elif not rule.fraction:
            why = NO_FRACTION
        elif any(homes[at] == "offload" for at in own):
            why = WITHIN_WINDOW
        elif not large:
            why = too_small(max(tensors[at].bytes for at in own), rule)
        elif rule.home == "stash":
            why = NO_EXPECTED_ROWS
        else:
            largest = max(large, key=lambda at: tensors[at].bytes)
            first = keeper.get(tensors[largest].storage, largest)
            why = FOR_REPLAY if first == largest else kept_by(tensors[first].region)
        found[rule.match] = why
    return found


class _Part:
    """The same rules, of whose bytes a part leaves."""

    def __init__(self, policy: Policy, fraction: float) -> None:
        self._policy, self._fraction = policy, fraction

    def rule_for(self, name: str) -> Rule | None:
        rule = self._policy.rule_for(name)
        if rule is None or not rule.offloads:
            return rule
        return replace(rule, fraction=self._fraction * rule.fraction)
