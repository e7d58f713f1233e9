"""Measured stages, unrolled in the order of a schedule's actions.

A stage is profiled with one microbatch. The rank's step is made of copies of its segments, one for each action: `F`
takes those of forward, `B` those of backward. A region of microbatch m is named `region@m` there, so that each
microbatch is recomputed and moved by itself. What is assumed:

- A split backward takes half of the measured time in `I` and half in `W`, saved tensors are first needed in `I` and
  freed in `W`, and replays happen in `I`. On the model's first stage `I` does nothing. Gradients that `W` begins
  with wait from `I` on (`profiling/split_backward.py`).
- Gradients are there from the beginning, and every backward adds to them: what a segment makes counts once more, in
  that segment.
- Messages between stages are held as `messages.py` says.
- A rank that waits for others is not slower for it: bubbles are no part of its step, and hide no copies.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pagestash.planning.lifetimes import MeasuredStep, with_memory
from pagestash.planning.messages import Messages, message_bytes
from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import OUTPUT, Region, SavedTensor, Segment
from pagestash.schedules.plan import Action
from pagestash.torch_internals import frees_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """One microbatch of a stage, as measured, and the messages between stages."""

    index: int
    profile: ProfiledStep
    received_bytes: int = 0
    """Its input, from the stage before."""
    result_bytes: int = 0
    """Its result, which the stage after receives, or the step returns."""
    is_last: bool = False
    """Whether it is the model's last stage."""
    saves_input: bool = False
    """Whether its input is one of the profile's counted storages."""

    @property
    def message_bytes(self) -> int:
        """The size of a hidden state."""
        return max(self.received_bytes, 0 if self.is_last else self.result_bytes)


class Unrolled:
    """Copies of the stages' segments, tensors and regions, in the order of actions."""

    def __init__(
        self, stages: Mapping[int, StageStep], actions: Sequence[Action], *, renamed: bool, messages: bool
    ) -> None:
        self.stages, self.actions = stages, actions
        self.renamed = renamed
        self.one = {index: MeasuredStep(stage.profile) for index, stage in stages.items()}
        self.gradients = {
            index: gradients_so_far(step, stages[index].message_bytes) for index, step in self.one.items()
        }
        self.waiting = {
            index: list(accumulate(segment.waiting_bytes for segment in step.profile.segments))
            for index, step in self.one.items()
        }
        """After each segment, bytes of gradients that wait for the second half of a split backward."""
        self.positions: dict[str, tuple[int, int]] = {}
        self.starts: list[int] = []
        self.persisting = self._persisting(messages)
        largest = max(_largest_storage(stage.profile) for stage in stages.values())
        self.shifts = {key: number * (largest + 1) for number, key in enumerate(self._runs())}
        """Added to the numbers of a microbatch's storages."""
        self.segments: list[Segment] = []
        self.extra: list[int] = []
        self.floor: list[int] = []
        halves = {(a.stage, a.microbatch) for a in actions if a.kind == "I"}
        self.at: dict[Action, int] = {}
        for action, persisting in zip(actions, self.persisting):
            self.starts.append(len(self.segments))
            self.at[action] = len(self.segments)
            part = 1.0 if action[1:] not in halves or action.stage == 0 else 0.5
            if action.kind != "I" or action.stage:
                self._add(action, persisting, part if action.kind != "F" else 1.0)
        self.halves: dict[int, tuple[int, int]] = {}
        """See `MeasuredStep.halves`."""
        self.tensors = [tensor for key in self._runs() for tensor in self._tensors(*key)]
        self.regions = list(self._regions())

    def profile(self) -> ProfiledStep:
        """All of it as one step."""
        first = next(iter(self.stages.values())).profile
        segments = self.segments
        if all(step.knows_memory for step in self.one.values()):
            segments = with_memory(self.segments, self.tensors, self.extra, self.floor)
        profiles = [stage.profile for stage in self.stages.values()]
        return ProfiledStep(
            device=first.device,
            link=first.link,
            tensors=self.tensors,
            regions=self.regions,
            segments=segments,
            plain_seconds=sum(segment.seconds for segment in segments),
            model_bytes=sum(profile.model_bytes for profile in profiles),
            gradient_bytes=sum(profile.gradient_bytes for profile in profiles),
        )

    def _runs(self) -> list[tuple[int, int]]:
        """All (stage, microbatch), in the order of their forwards."""
        return [(action.stage, action.microbatch) for action in self.actions if action.kind == "F"]

    def _persisting(self, messages: bool) -> list[int]:
        """Bytes that are there in the whole of each action: messages, and what waits within a split backward."""
        if not messages:
            return [0] * len(self.actions)
        sizes = {
            index: Messages(
                stage.received_bytes,
                stage.result_bytes,
                is_last=stage.is_last,
                saves_input=stage.saves_input,
                saved_result=_saved_result(self.one[index]),
            )
            for index, stage in self.stages.items()
        }
        found, now = message_bytes(sizes, self.actions, frees=frees_messages()), 0
        for at, action in enumerate(self.actions):
            found[at] += now
            now += {"I": 1, "W": -1}.get(action.kind, 0) * self.waiting[action.stage][-1]
        return found

    # --- segments ---

    def _add(self, action: Action, persisting: int, part: float) -> None:
        step, gradients = self.one[action.stage], self.gradients[action.stage]
        waiting = self.waiting[action.stage] if action.kind == "I" else [0] * step.count
        forward = action.kind == "F"
        for at in range(step.turn) if forward else range(step.turn, step.count):
            segment = step.segments[at]
            path = self._path(segment.path, action.microbatch)
            self.segments.append(Segment(path, segment.way, part * step.seconds[at]))
            before, after = (0, 0) if forward else (gradients[at - 1], gradients[at])
            self.extra.append(max(0, step.extra[at] - before) + persisting + waiting[at - 1])
            self.floor.append(max(0, step.floor[at] - after) + persisting + waiting[at])

    # --- tensors and regions ---

    def _tensors(self, stage: int, microbatch: int) -> Iterator[SavedTensor]:
        step, gradients = self.one[stage], self.gradients[stage]
        shift = self.shifts[stage, microbatch]
        forward = self.at[Action("F", stage, microbatch)]
        whole = self.at.get(Action("B", stage, microbatch))
        needed = self.at[Action("I", stage, microbatch)] if whole is None and stage else whole
        freed = self.at[Action("W", stage, microbatch)] if whole is None else whole
        needed = freed if needed is None else needed
        persisting = dict(zip(self.starts, self.persisting))[needed]
        for tensor in step.profile.tensors:
            if needed != freed:
                done, begins = (at - step.turn for at in (tensor.freed_at, tensor.needed_at))
                self.halves[tensor.storage + shift] = needed + done, freed + begins
            beside = tensor.beside_bytes
            if beside is not None:
                beside = max(0, beside - gradients[tensor.needed_at - 1]) + persisting
            yield replace(
                tensor,
                region=self._name(tensor.region, microbatch),
                path=self._path(tensor.path, microbatch),
                storage=tensor.storage + shift,
                saved_at=forward + tensor.saved_at,
                needed_at=needed + tensor.needed_at - step.turn,
                freed_at=freed + tensor.freed_at - step.turn,
                beside_bytes=beside,
                asked=(needed + tensor.asked[0] - step.turn, tensor.asked[1]),
                done_at=freed + tensor.done_at - step.turn,
            )

    def _regions(self) -> Iterator[Region]:
        for number, (stage, microbatch) in enumerate(self._runs()):
            shift = self.shifts[stage, microbatch]
            for region in self.stages[stage].profile.regions:
                if not region.name and number:
                    continue
                name = self._name(region.name, microbatch)
                if name:
                    self.positions[name] = (stage, microbatch)
                yield replace(
                    region,
                    name=name,
                    path=self._path(region.path, microbatch),
                    within=self._name(region.within, microbatch),
                    inputs=tuple(storage + shift for storage in region.inputs),
                    outputs=tuple(storage + shift for storage in region.outputs),
                    unsaved_inputs=tuple((storage + shift, size) for storage, size in region.unsaved_inputs),
                    unsaved_outputs=tuple(
                        (storage + shift, size) for storage, size in region.unsaved_outputs
                    ),
                )

    def _name(self, name: str, microbatch: int) -> str:
        return f"{name}@{microbatch}" if name and self.renamed else name

    def _path(self, path: tuple[str, ...], microbatch: int) -> tuple[str, ...]:
        return tuple(self._name(name, microbatch) for name in path)


def gradients_so_far(step: MeasuredStep, message_bytes: int) -> list[int]:
    """After each segment, bytes of gradients that backward has made at least; the last entry is for none.

    What is beside saved tensors in backward and never goes away again is gradients, and the gradient of a hidden
    state, which is as large as a message.
    """
    found, least = [0] * step.count, step.profile.gradient_bytes + message_bytes
    for at in reversed(range(step.turn, step.count)):
        least = min(least, step.floor[at])
        found[at] = max(0, least - message_bytes)
    return [*found, 0]


def _saved_result(step: MeasuredStep) -> int:
    """Bytes of the model's result that are saved tensors, too."""
    results = {tensor.storage for tensor in step.profile.tensors if OUTPUT in tensor.held_by}
    return sum(life.bytes for storage, life in step.lives.items() if storage in results)


def _largest_storage(profile: ProfiledStep) -> int:
    found = [tensor.storage for tensor in profile.tensors]
    for region in profile.regions:
        unsaved = (*region.unsaved_inputs, *region.unsaved_outputs)
        found += [*region.inputs, *region.outputs, *(storage for storage, _ in unsaved)]
    return max(found, default=0)


def joined(stages: Iterable[StageStep]) -> ProfiledStep:
    """One microbatch through the stages of a rank, as if they were one model."""
    by_index = {stage.index: stage for stage in sorted(stages, key=lambda stage: stage.index)}
    forward = [Action("F", index, 0) for index in by_index]
    backward = [Action("B", index, 0) for index in reversed(by_index)]
    return Unrolled(by_index, [*forward, *backward], renamed=False, messages=False).profile()
