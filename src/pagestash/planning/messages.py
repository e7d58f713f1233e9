"""What torch holds of the messages between stages, while a rank runs its actions.

- The model's last stage holds every result to the step's end. A rank of one stage holds the gradient that it sent
  last. A rank of several stages, or with a split backward, holds all gradients that it sent to the step's end.
- From torch 2.15 on (`frees`) a buffer is there from its receive to the end of the microbatch's backward. A result
  is there until it was sent; a rank of several stages holds it until its backward is over. The results of the last
  stage keep its inputs, with which their graphs begin.
- Earlier, buffers for all inputs and gradients of a step are there from its beginning. A result is there until its
  backward is over, and in a rank of several stages to the step's end.

Where two stages of a rank follow each other, the result of the one is the input of the other, and nothing is sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pagestash.schedules.plan import Action, Plan, in_flight

Key: TypeAlias = tuple[str, int]
"""An action's kind, and its stage."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Bytes of what one stage receives and returns, in one microbatch, and whether they are saved tensors, too."""

    received: int
    result: int
    is_last: bool
    """Whether the stage is the model's last one."""
    saves_input: bool
    saved_result: int
    """How many bytes of the result are saved tensors."""

    @property
    def unsaved_result(self) -> int:
        return max(0, self.result - self.saved_result)


@dataclass(slots=True)
class Changes:
    """Bytes that are there at the step's beginning, and what each action adds before it runs, and after."""

    now: int = 0
    before: Counter[Key] = field(default_factory=Counter)
    after: Counter[Key] = field(default_factory=Counter)

    def during(self, actions: Sequence[Action]) -> list[int]:
        """In the whole of each action."""
        found, now = [], self.now
        for kind, index, _ in actions:
            now += self.before[kind, index]
            found.append(now)
            now += self.after[kind, index]
        return found


def message_bytes(stages: Mapping[int, Messages], actions: Sequence[Action], *, frees: bool) -> list[int]:
    """Bytes of messages that are there in the whole of each action, and are no saved tensors."""
    several = len(stages) > 1 or any(action.kind == "I" for action in actions)
    if not frees:
        return _kept(stages, actions, several).during(actions)
    made = Changes()
    for index, stage in stages.items():
        _hold_input(made, index, stage, sent=index - 1 not in stages)
        _hold_gradients(made, index, stage, stages, several)
        if stage.is_last or several:
            _hold_result(made, index, stage, stages)
    found = made.during(actions)
    if several:  # what the next action needs is received already
        for at, following in enumerate(actions[1:]):
            found[at] += max(0, made.before[following.kind, following.stage])
        return found
    waiting = 0
    for at, action in enumerate(actions):
        stage = stages[action.stage]
        if not stage.is_last:  # when the next backward begins, all results have been sent
            waiting = waiting if action.kind == "F" else 0
            found[at] += waiting
            waiting += stage.unsaved_result
    return found


def _ends(index: int) -> tuple[Key, Key]:
    """A microbatch's backward is over."""
    return ("B", index), ("W", index)


def _hold_input(made: Changes, index: int, stage: Messages, *, sent: bool) -> None:
    saved = stage.received if stage.saves_input else 0
    own = stage.received if sent else 0  # else the result of the stage before, which counts there
    made.before["F", index] += own - saved
    for end in _ends(index):
        stays = stage.is_last and sent and end[0] == "B"  # (a split backward cuts the graph off)
        made.after[end] += saved - (0 if stays else own)


def _hold_result(made: Changes, index: int, stage: Messages, stages: Mapping[int, Messages]) -> None:
    made.after["F", index] += stage.unsaved_result
    following = stages.get(index + 1)
    for end in _ends(index):
        stays = stage.is_last or (following is not None and following.is_last and end[0] == "B")
        made.after[end] += stage.saved_result if stays else -stage.unsaved_result


def _hold_gradients(
    made: Changes, index: int, stage: Messages, stages: Mapping[int, Messages], several: bool
) -> None:
    """Of the input, where it is sent, and of the result."""
    for kind in ("B", "I"):
        if index - 1 not in stages and several:
            made.after[kind, index] += stage.received
        if not stage.is_last:
            if index + 1 in stages:
                made.after[kind, index + 1] += stage.result
            else:
                made.before[kind, index] += stage.result
            made.after[kind, index] -= stage.result
    if not several:
        made.now += stage.received


def _kept(stages: Mapping[int, Messages], actions: Sequence[Action], several: bool) -> Changes:
    made = Changes()
    most = in_flight(Plan(tuple(actions)))
    for index, stage in stages.items():
        count = sum(action.kind == "F" and action.stage == index for action in actions)
        made.now += (count - most[index] * stage.saves_input) * stage.received  # inputs
        if index - 1 in stages:  # which has the gradients of all of them
            made.now += count * stage.received
        elif not several:  # the gradient that was sent last
            made.now += stage.received
        else:
            made.after["B", index] = made.after["I", index] = stage.received
        here = index + 1 in stages  # the result is one of the next stage's inputs
        if not stage.is_last and not here:  # gradients of all results, and the last result that was sent
            made.now += (count + 1 - several) * stage.result
        change = -stage.saved_result if here else stage.unsaved_result
        over = stage.saved_result if stage.is_last or several else -change
        made.after["F", index] = change
        made.after["B", index] += over
        made.after["W", index] = over
    return made
