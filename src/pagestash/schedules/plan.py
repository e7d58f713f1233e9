"""The plan of a pipeline schedule, known before it runs.

A *stage* is a number of consecutive layers; a rank has one or more. An *action* is one call of a stage for one
microbatch: `F` its forward, `B` its backward; in a split backward `I`, the gradient of the stage's input, and
later `W`, those of its weights. A *plan* is the list of one rank's actions in execution order.

Most schedules of `torch.distributed.pipelining` run from a list of actions, which is read. GPipe and 1F1B run
from code, and the list that they also have differs from what they do (1F1B's last rank is off by one
microbatch, and its forwards and backwards have another order): their plans are derived from the code. So is that of
Interleaved1F1B: torch is imported where a live schedule is read, or one that has no plan here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["F", "B", "I", "W"]
_KINDS = get_args(Kind)

SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""Names of the schedules that can be followed: torch's class names without `Schedule`."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which rank r has stage r and stage `last - r`."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that split a stage's backward: first input gradients, later weight gradients."""
ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""


class Action(NamedTuple):
    """One call of a stage, written as torch does: `3B2` is stage 3's backward of microbatch 2."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's actions in a step, in order."""

    actions: tuple[Action, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, in the order of the model."""
        return tuple(sorted({action.stage for action in self.actions}))

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split."""
        return any(action.kind == "I" for action in self.actions)

    def held(self) -> Iterator[dict[int, int]]:
        """After each action, the number of microbatches whose activations each stage holds.

        A microbatch is held until its backward is done; if that is split, until `W` is done.
        """
        counts = dict.fromkeys(self.stages, 0)
        for action in self.actions:
            counts[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            yield dict(counts)

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))


def in_flight(plan: Plan) -> dict[int, int]:
    """The most microbatches whose activations each stage of the rank holds at one time.

    Examples:
        >>> in_flight(plans("1F1B", ranks=4, microbatches=8)[1])
        {1: 3}
    """
    most = dict.fromkeys(plan.stages, 0)
    for counts in plan.held():
        for stage, count in counts.items():
            most[stage] = max(most[stage], count)
    return most


def immediate_backwards(plan: Plan) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) whose backward is the next thing after its forward.

    On the first stage of a model the first half of a split backward does nothing, and the second all of it: the
    two still are one backward here, which comes next.
    """
    return frozenset(
        (first.stage, first.microbatch)
        for first, second in zip(plan.actions, plan.actions[1:])
        if first.kind == "F" and second.kind in ("B", "I") and first[1:] == second[1:]
    )


def read_plan(schedule: Any) -> Plan:
    """The plan of the next `schedule.step()` on this rank; a `ValueError` if it cannot be known."""
    from pagestash.torch_internals import (
        has_backward,
        microbatches_of,
        replaced_actions,
        runs_as,
        stages_of,
    )

    replaced = replaced_actions(schedule)
    if replaced:
        raise ValueError(
            f"{type(schedule).__name__} runs custom functions for {', '.join(replaced)} "
            "(register_custom_function): what they do to the stages cannot be known"
        )
    match runs_as(schedule):
        case "1F1B":
            (stage,) = stages_of(schedule)
            actions = _one_forward_one_backward(
                stage.stage_index, stage.num_stages, microbatches_of(schedule)
            )
        case "GPipe":
            (stage,) = stages_of(schedule)
            actions = _gpipe(stage.stage_index, microbatches_of(schedule))
        case "list":
            actions = _flat(schedule.pipeline_order_with_comms[schedule.rank])
        case _:
            raise ValueError(
                f"{type(schedule).__name__} cannot be followed: its plan cannot be read in advance. Supported "
                f"are {', '.join(f'Schedule{name}' for name in SCHEDULES)} of torch.distributed.pipelining"
            )
    if not has_backward(schedule):
        actions = (action for action in actions if action.kind == "F")
    return Plan(tuple(actions))


def plans(
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None, overlap: bool = False
) -> list[Plan]:
    """The plans of all ranks under a schedule of this name, without a process group.

    With `overlap` they are those of `pipeline.overlapped_schedule`, the forward of a pair first: both hold memory.

    `chunks` is the number of stages per rank: 1 for `GPipe` and `1F1B`, otherwise 2 by default. What a schedule
    does not allow, such as fewer microbatches than stages, is a `ValueError`.
    """
    name = schedule_name(name)
    if ranks < 1 or microbatches < 1:
        raise ValueError(f"ranks={ranks}, microbatches={microbatches}: expected at least 1 of each")
    chunks = stages_a_rank(name, chunks)
    if overlap and name not in V_SHAPED:  # (those have their pairs already)
        orders = orders_of_pairs(name, ranks, microbatches, chunks)
        return [Plan(tuple(action for pair in order for action in pair)) for order in orders]
    if name == "GPipe":
        return [Plan(tuple(_gpipe(stage, microbatches))) for stage in range(ranks)]
    if name == "1F1B":
        if microbatches < ranks:
            raise ValueError(
                f"1F1B needs at least as many microbatches as stages: got {microbatches} for {ranks} stages"
            )
        return [Plan(tuple(_one_forward_one_backward(stage, ranks, microbatches))) for stage in range(ranks)]
    if name == "Interleaved1F1B":
        return [Plan(tuple(_interleaved(rank, ranks, microbatches, chunks))) for rank in range(ranks)]
    order = orders_of_torch(name, ranks, microbatches, chunks)
    return [Plan(tuple(_flat(order[rank]))) for rank in range(ranks)]


def orders_of_pairs(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[tuple[Action, ...]]]:
    """Each rank's order of single actions and pairs."""
    if name == "1F1B":
        ours = partial(_one_forward_one_backward, stages=ranks, microbatches=microbatches, overlap=True)
        return [paired(ours(stage)) for stage in range(ranks)]
    return [
        paired(plan.actions) for plan in plans(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    ]


def paired(actions: Iterable[Action]) -> list[tuple[Action, ...]]:
    """Each action alone, or a forward and the backward before it, of another microbatch or stage, as a pair."""
    found: list[tuple[Action, ...]] = []
    for action in actions:
        before = found[-1] if found else ()
        if len(before) == 1 and (before[0].kind, action.kind) == ("B", "F") and before[0][1:] != action[1:]:
            found[-1] = (action, *before)
        else:
            found.append((action,))
    return found


def stages_a_rank(name: str, chunks: int | None = None) -> int:
    """The number of stages per rank under this schedule; `chunks` if it leaves the choice."""
    if name in ONE_STAGE or name in V_SHAPED:
        only = 1 if name in ONE_STAGE else 2
        if chunks not in (None, only):
            raise ValueError(f"{name} has {only} stage{'s' * (only > 1)} per rank, not {chunks}")
        return only
    if chunks is not None and chunks < 2:
        raise ValueError(f"{name} needs at least 2 stages per rank, not {chunks}")
    return 2 if chunks is None else chunks


def schedule_name(name: str) -> str:
    """The schedule's name as torch spells it; case and a leading `Schedule` are ignored."""
    wanted = name.lower().removeprefix("schedule")
    for known in SCHEDULES:
        if known.lower() == wanted:
            return known
    raise ValueError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")


def _gpipe(stage: int, microbatches: int) -> Iterator[Action]:
    for kind in ("F", "B"):
        for microbatch in range(microbatches):
            yield Action(kind, stage, microbatch)


def _one_forward_one_backward(
    stage: int, stages: int, microbatches: int, *, overlap: bool = False
) -> Iterator[Action]:
    """`stages - stage` forwards, then backward and forward alternately, then the remaining backwards.

    To `overlap` the two, there are enough forwards for one to go to the last stage and come back in pairs.
    """
    ahead = min(microbatches, 2 * (stages - 1 - stage) + 1 if overlap else stages - stage)
    for microbatch in range(ahead):
        yield Action("F", stage, microbatch)
    for microbatch in range(microbatches):
        yield Action("B", stage, microbatch)
        if microbatch + ahead < microbatches:
            yield Action("F", stage, microbatch + ahead)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Stages take turns, for so many microbatches that each rank has one: first forwards, then as 1F1B."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ValueError(f"Interleaved1F1B: {microbatches} microbatches do not divide into {rounds} rounds")
    turn, total = microbatches // rounds, microbatches * chunks
    ahead = min(total, (chunks - 1) * turn + 2 * (ranks - 1 - rank))
    done: dict[tuple[Kind, int], int] = {}

    def action(kind: Kind, chunk: int) -> Action:
        number = done[kind, chunk] = done.get((kind, chunk), -1) + 1
        return Action(kind, chunk * ranks + rank, number)

    for at in range(total + ahead):
        if at < total:
            yield action("F", at // turn % chunks)
        if at >= ahead:
            yield action("B", chunks - 1 - (at - ahead) // turn % chunks)


def _flat(actions: Iterable[Any]) -> Iterator[Action]:
    """The calls of stages among a schedule's actions; an overlapping pair runs in its order."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _flat(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def orders_of_torch(name: str, ranks: int, microbatches: int, chunks: int) -> dict[int, list[Any]]:
    """The actions of all ranks that torch's class of this name generates, for stages without modules."""
    from pagestash.torch_internals import pipeline_schedules, without_communication

    schedule = getattr(pipeline_schedules(), f"Schedule{name}")
    stages = [
        SimpleNamespace(
            group_rank=0,
            group_size=ranks,
            num_stages=ranks * chunks,
            stage_index=chunk * ranks,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    return without_communication(schedule)(stages, microbatches).pipeline_order
