"""Pipeline schedules that run a forward and a backward as a pair, each one's exchanges under the other's compute.

torch's runtime runs the two actions of a pair (`OVERLAP_F_B`) one after the other. Here the forward's call runs
both, through `overlap`, and the backward's call, which comes next, finds its work done.

`DualPipeV` has pairs of its own. In the other two every backward that a forward follows makes a pair with it. A
pair takes as long as both, and passes its results on at its end. So that no rank waits for another, a rank of S
must have begun enough forwards for a microbatch to go to the last rank and back, one pair at each:

    forwards before the first pair of rank r:    1F1B 2·(S - 1 - r) + 1, where it has S - r without pairs

`Interleaved1F1B` has as many already.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from pagestash.moe.parallel.overlap import overlap
from pagestash.schedules.plan import orders_of_pairs, schedule_name
from pagestash.torch_internals import (
    has_backward,
    make_schedule,
    pairs_of,
    ready_for_backward,
    run_in_order,
    stages_of,
)

Chunk = tuple[int, int]
"""A stage and a microbatch."""
OVERLAPPED = ("1F1B", "Interleaved1F1B", "DualPipeV")


def overlapped_schedule(
    name: str, stages: Sequence[Any], microbatches: int, loss_fn: Callable[..., Any], **options: Any
) -> Any:
    """A schedule of `torch.distributed.pipelining` for this rank's `stages`, which overlaps its pairs.

        schedule = overlapped_schedule("DualPipeV", stages, 16, loss_fn=loss)
        schedule.step(tokens)

    Gradients have the bits of the schedule of that name without overlap. `1F1B` holds more microbatches than that.
    `options` are those of torch's schedules.
    """
    name = schedule_name(name)
    if name not in OVERLAPPED:
        raise ValueError(f"{name} has no pairs to overlap; expected one of {', '.join(OVERLAPPED)}")
    if name == "DualPipeV":
        schedule = make_schedule(name, stages, microbatches, loss_fn=loss_fn, **options)
    else:
        schedule = make_schedule("", stages, microbatches, loss_fn=loss_fn, **options)
        run_in_order(schedule, orders_of_pairs(name, stages[0].group_size, microbatches, len(stages)))
    schedule.step = _OverlappedStep(schedule, schedule.step)
    return schedule


class _OverlappedStep:
    """The `step` of a schedule, in which the forward of a pair runs its backward as well."""

    def __init__(self, schedule: Any, step: Callable[..., Any]) -> None:
        self._schedule, self._step = schedule, step
        self._stages = {stage.stage_index: stage for stage in stages_of(schedule)}
        self._partners: dict[Chunk, Chunk] = dict(pairs_of(schedule))
        """The backward of each forward that has one."""
        self._done: set[Chunk] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not has_backward(self._schedule):
            return self._step(*args, **kwargs)
        with ExitStack() as stack:
            stack.callback(self._done.clear)
            # For the time of the step alone, and so around whatever else observes the stages.
            for stage in self._stages.values():
                for name, around in (
                    ("forward_one_chunk", self._forward),
                    ("backward_one_chunk", self._backward),
                ):
                    stack.callback(_put_back, stage, name, vars(stage).get(name))
                    setattr(stage, name, _Around(around, stage.stage_index, getattr(stage, name)))
            return self._step(*args, **kwargs)

    def _forward(
        self, stage: int, inner: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any
    ) -> Any:
        partner = self._partners.get((stage, microbatch))
        if partner is None:
            return inner(microbatch, *args, **kwargs)
        output, _ = overlap(lambda: inner(microbatch, *args, **kwargs), lambda: self._run_backward(*partner))
        self._done.add(partner)
        return output

    def _run_backward(self, number: int, microbatch: int) -> None:
        stage = self._stages[number]
        loss, last = ready_for_backward(self._schedule, stage, microbatch)
        stage.backward_one_chunk.inner(microbatch, loss=loss, full_backward=True, last_backward=last)

    def _backward(
        self, stage: int, inner: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any
    ) -> Any:
        if (stage, microbatch) in self._done:
            self._done.remove((stage, microbatch))
            return None
        return inner(microbatch, *args, **kwargs)


class _Around:
    """A method of a stage with `around` in its place."""

    def __init__(self, around: Callable[..., Any], stage: int, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self._around, self._stage = around, stage

    def __call__(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._stage, self.inner, microbatch, *args, **kwargs)


def _put_back(stage: Any, name: str, before: Any) -> None:
    if before is None:  # the method of its class
        delattr(stage, name)
    else:
        setattr(stage, name, before)
