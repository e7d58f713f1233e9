"""The steady state of a schedule, cut short: a step of few microbatches that is like one of many."""

from collections.abc import Iterable

from pagestash.schedules.plan import Action, Plan

State = tuple[tuple[int, str], ...]
"""For each microbatch in flight, its stage and the last of its actions."""


def shortened(plan: Plan) -> Plan:
    """The plan without the middle of its steady state, which repeats what is left; the plan itself if it has none.

    Between two moments with the same microbatches in flight, up to their numbers, actions can be cut out, unless
    what is in flight meanwhile is so nowhere else. The first two and the last such moments are left.
    """
    running = [_running(plan.actions[: at + 1]) for at in range(len(plan.actions))]
    states = [tuple((stage, kind) for (stage, _), kind in _by_stage(now)) for now in running]
    found: dict[State, list[int]] = {}
    for at, state in enumerate(states):
        found.setdefault(state, []).append(at + 1)
    begin = end = 0
    for ats in found.values():
        first, last = ats[min(1, len(ats) - 1)], ats[max(0, len(ats) - 2)]
        kept = {*states[:first], *states[last:]}
        if last - first > end - begin and kept.issuperset(states[first:last]):
            begin, end = first, last
    if begin == end:
        return plan
    before, after = (_by_stage(running[at - 1]) for at in (begin, end))
    names = {key: old[1] for (old, _), (key, _) in zip(before, after)}
    actions = list(plan.actions[:begin])
    taken = {
        stage: 1 + max((a.microbatch for a in actions if a.stage == stage), default=-1)
        for stage in plan.stages
    }
    for action in plan.actions[end:]:
        key = action.stage, action.microbatch
        if key not in names:
            names[key] = taken[action.stage]
            taken[action.stage] += 1
        actions.append(Action(action.kind, action.stage, names[key]))
    return Plan(tuple(actions))


def _running(actions: Iterable[Action]) -> dict[tuple[int, int], str]:
    """The (stage, microbatch) in flight after these actions, oldest first, and the last action of each."""
    running: dict[tuple[int, int], str] = {}
    for action in actions:
        running[action.stage, action.microbatch] = action.kind
        if action.kind in "BW":
            del running[action.stage, action.microbatch]
    return running


def _by_stage(running: dict[tuple[int, int], str]) -> list[tuple[tuple[int, int], str]]:
    return sorted(running.items(), key=lambda item: item[0][0])
