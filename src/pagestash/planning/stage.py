"""One stage of a pipeline, as the caller gives it: its number, its schedule and its messages."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from pagestash.planning.unrolled import StageStep
from pagestash.profiling.measure import Loss
from pagestash.profiling.profiled import ProfiledStep
from pagestash.schedules.plan import Plan, read_plan
from pagestash.torch_internals import stages_of, tree_leaves, tree_map


def rank_plan(schedule: Any, stages: Collection[int] | None = None) -> tuple[Plan, int | None]:
    """The plan of the rank that has exactly these stages, and the number of the model's last stage, if known.

    `schedule` is one of torch's, the plan of a rank, or the plans of all ranks. Without `stages` there must be one
    rank.
    """
    last: int | None = None
    if isinstance(schedule, Plan):
        ranks = [schedule]
    elif isinstance(schedule, list | tuple) and schedule and all(isinstance(item, Plan) for item in schedule):
        ranks, last = list(schedule), max(max(item.stages) for item in schedule)
    elif isinstance(schedule, str):
        raise ValueError(
            f"schedule={schedule!r}: expected a schedule, or plans({schedule!r}, ranks=…, microbatches=…) of "
            "pagestash.pipeline"
        )
    else:
        ranks, last = [read_plan(schedule)], stages_of(schedule)[0].num_stages - 1
    for plan in ranks:
        if (stages is None and len(ranks) == 1) or set(plan.stages) == set(stages or ()):
            return plan, last
        if set(plan.stages) & set(stages or ()):
            raise ValueError(
                f"stages {', '.join(map(str, plan.stages))} share a rank and its policy: plan them together, with "
                "plan_stages of pagestash.planning"
            )
    known = ", ".join(str(number) for plan in ranks for number in plan.stages)
    wanted = "stage=None" if stages is None else f"stage={', '.join(map(str, stages))}"
    raise ValueError(f"{wanted}: the schedule has the stages {known}")


def stage_step(
    profile: ProfiledStep, index: int, *, is_last: bool, result_bytes: int | None = None
) -> StageStep:
    """A stage that was profiled by itself.

    Without `result_bytes` its result is as large as its input; that of the last stage is a loss, which is small.
    """
    inputs: dict[int, int] = {}
    for tensor in profile.tensors:
        if index and tensor.kind == "input" and "float" in tensor.dtype:
            inputs[tensor.storage] = max(tensor.bytes, inputs.get(tensor.storage, 0))
    got = sum(inputs.values())
    if result_bytes is None:
        result_bytes = 0 if is_last else got
    return StageStep(
        index=index, profile=profile, received_bytes=got, result_bytes=result_bytes, is_last=is_last
    )


def received(batch: Any) -> Any:
    """A stage's input as it receives it: it requires a gradient."""

    def leaf(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if floats else value

    return tree_map(leaf, dict(batch) if isinstance(batch, Mapping) else batch)


class ResultBytes:
    """A loss that notes the size of the model's output."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.bytes = 0

    def __call__(self, output: Any) -> torch.Tensor:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        return self._loss(output)
