"""A measured step as a stage that the replay runs: what a profile says of one rank, one microbatch at a time."""

from collections.abc import Sequence
from itertools import pairwise
from unittest.mock import patch

from pagestash.planning.home_bytes import HomeBytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.offloaded import Offloaded, OffloadedGroup
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import Prediction, RuleTable
from pagestash.policy import Policy
from pagestash.profiling.copies import as_asked
from pagestash.profiling.groups import Move
from pagestash.profiling.link import Link
from pagestash.profiling.profiled import ProfiledStep
from pagestash.saved.offload.plan import Event
from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.replay.programs import Piece, StageProgram


def program_of_profile(profile: ProfiledStep, policy: Policy) -> StageProgram:
    """The measured step under a policy: a piece for each segment, with replays and copies on the device in it.

    What is beside offloaded groups is as predicted of a step that waits; when those leave and return is left to the
    replay. Groups must be like those of simulated layers, which leave and return as a whole.
    """
    step = MeasuredStep(profile)
    predicted, offloaded = _predicted(step, RuleTable.of(policy, profile.regions))
    waits = dict.fromkeys(range(step.count + 1), 0.0)
    for at, wait in predicted.waits:
        waits[at] += wait
    ends = pairwise((*predicted.starts, predicted.seconds))
    seconds = [end - start - waits[at] for at, (start, end) in enumerate(ends)]
    pieces = [Piece(segment.way, own) for segment, own in zip(profile.segments, seconds)]
    groups: dict[str, int] = {}
    for group in offloaded:
        move, name = group.move, _name(group.move)
        groups[name] = move.device_bytes
        put, dropped = pieces[move.put_at - 1], move.dropped_at - 1
        taken = put.takes + group.leaving_bytes
        pieces[move.put_at - 1] = put._replace(puts=(*put.puts, name), takes=taken)
        pieces[dropped] = pieces[dropped]._replace(drops=(*pieces[dropped].drops, name))
    for move in as_asked([group.move for group in offloaded]):
        for at in move.asked_at:
            pieces[at] = pieces[at]._replace(gets=(*pieces[at].gets, _name(move)))
    for at, (before, now) in enumerate(pairwise((0, *_beside_groups(predicted, offloaded)))):
        if now > before:
            pieces[at] = pieces[at]._replace(takes=pieces[at].takes + now - before)
        elif now < before:
            pieces[at - 1] = pieces[at - 1]._replace(frees=pieces[at - 1].frees + before - now)
    return StageProgram({"F": pieces[: step.turn], "B": pieces[step.turn :]}, groups)


def moves_whole_groups(profile: ProfiledStep, policy: Policy) -> bool:
    """Whether every offloaded group leaves and returns as a whole."""
    _, offloaded = _predicted(MeasuredStep(profile), RuleTable.of(policy, profile.regions))
    moves = ((group.move, group.leaving_bytes) for group in offloaded)
    return all(
        m.bytes == m.device_bytes == leaving and not m.kept_bytes and m.window is None for m, leaving in moves
    )


def _predicted(step: MeasuredStep, rules: RuleTable) -> tuple[Prediction, Sequence[OffloadedGroup]]:
    """What is predicted, and the offloaded groups."""
    seen = []

    class Seen(Offloaded):
        def headroom(self, held: HomeBytes, pool: int) -> dict[Event, int]:
            seen.append(self.groups)
            return super().headroom(held, pool)

    with patch("pagestash.planning.predict.Offloaded", Seen):
        predicted = Predictor(step).predict(rules)
    return predicted, seen[0]


def _name(move: Move) -> str:
    return f"{move.key[0]}@{move.key[-1]}"


def _beside_groups(predicted: Prediction, groups: Sequence[OffloadedGroup]) -> list[int]:
    """Device bytes in each segment, but for groups that were put and may leave."""
    held = HomeBytes(len(predicted.starts))
    for move, saved, own, leaving in groups:
        for saved_at, size in saved:
            held.add("offload", saved_at, move.put_at - 2, size)
        held.add("offload", move.put_at - 1, move.dropped_at - 1, own - leaving)
        for part in move.slices:
            held.add("offload", part.needed_at, part.needed_at, part.span_bytes)
    others = [sizes for home, sizes in predicted.memory.items() if home != "offload"]
    return [sum(sizes) for sizes in zip(held.levels()["offload"], *others)]


def link_of_profile(link: Link) -> HostLink:
    """The measured link of one device that shares it with none."""
    return HostLink(out=link.out, back=link.back, both=float("inf"))
