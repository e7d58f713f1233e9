"""A measured step as a stage that the replay runs: what a profile says of one rank, one microbatch at a time."""

from itertools import pairwise

from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable
from pagestash.policy import Policy
from pagestash.profiling.assign import Recomputing, assign_when_saved
from pagestash.profiling.copies import moves_of
from pagestash.profiling.link import Link
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import Segment
from pagestash.simulation.costs import HostLink
from pagestash.simulation.programs import MovedGroup, Piece, StageProgram


def program_of_profile(profile: ProfiledStep, policy: Policy) -> StageProgram:
    """The measured step under a policy: a piece for each segment, with replays and copies on the device in it.

    What is beside offloaded groups is as predicted; when those leave and return is left to the replay. There a
    group has all its storages to itself: one that another region keeps counts twice.
    """
    step, rules = MeasuredStep(profile), RuleTable.of(policy, profile.regions)
    predicted = Predictor(step).predict(rules)
    waits = dict.fromkeys(range(step.count + 1), 0.0)
    for at, wait in predicted.waits:
        waits[at] += wait
    ends = pairwise((*predicted.starts, predicted.seconds))
    seconds = [end - start - waits[at] for at, (start, end) in enumerate(ends)]
    homes = assign_when_saved(rules, step.index, Recomputing(rules, step.index, profile.regions))
    segments = [Segment(segment.path, segment.way, own) for segment, own in zip(profile.segments, seconds)]
    pieces = [Piece(segment.way, segment.seconds) for segment in segments]
    groups: dict[str, MovedGroup] = {}
    others = (sizes for home, sizes in predicted.memory.items() if home != "offload")
    held = [sum(sizes) for sizes in zip(*others)]  # in each segment, beside groups that were put
    for move in moves_of(rules, profile.tensors, homes, segments):
        name = f"{move.key[0]}@{move.key[-1]}"
        groups[name] = MovedGroup(move.bytes, move.device_bytes, window=move.window)
        put, dropped = pieces[move.put_at - 1], move.dropped_at - 1
        pieces[move.put_at - 1] = put._replace(puts=(*put.puts, name), takes=put.takes + move.device_bytes)
        for at in move.asked_at:
            pieces[at] = pieces[at]._replace(gets=(*pieces[at].gets, name))
        pieces[dropped] = pieces[dropped]._replace(drops=(*pieces[dropped].drops, name))
        for life in (step.lives[storage] for storage in move.storages if storage in step.lives):
            for at in range(life.saved_at, move.put_at - 1):
                held[at] += life.bytes
    for at, (before, now) in enumerate(pairwise((0, *held))):
        if now > before:
            pieces[at] = pieces[at]._replace(takes=pieces[at].takes + now - before)
        elif now < before:
            pieces[at - 1] = pieces[at - 1]._replace(frees=pieces[at - 1].frees + before - now)
    return StageProgram({"F": pieces[: step.turn], "B": pieces[step.turn :]}, groups)


def link_of_profile(link: Link) -> HostLink:
    """The measured link of one device that shares it with none."""
    most = float("inf")
    return HostLink(
        out=link.out,
        back=link.back,
        both=most,
        shared_out=most,
        shared_back=most,
        devices=1,
    )
