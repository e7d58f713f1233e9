"""Forward and backward of a step, for the whole model or for this rank's stages of a pipeline.

Both leave in `grad` the gradients of the microbatches' mean loss. They return that mean, without auxiliary
losses (None if another rank has the last stage), and the peak of saved bytes by home.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from pagestash.models.decoder import Decoder
from pagestash.moe.parallel.overlap import overlap
from pagestash.pipeline.overlapped import overlapped_schedule
from pagestash.pipeline.split_backward import delay_weight_gradients
from pagestash.saved.keeper import Keeper
from pagestash.schedules.observe import Observation
from pagestash.schedules.plan import Action, Plan
from pagestash.torch_internals import foreach_div_
from pagestash.train.parallel import RunRanks
from pagestash.train.prepare import RunPlan

Precision = Callable[[], AbstractContextManager[Any]]
HeldBytes = dict[Any, int | torch.Tensor]


class WholeModel:
    """Runs the microbatches one after the other through all layers."""

    def __init__(
        self, plan: RunPlan, ranks: RunRanks, models: Sequence[Decoder], keeper: Keeper, precision: Precision
    ) -> None:
        (self._model,) = models
        self._parts, self._keeper, self._precision = plan.config.parts, keeper, precision
        self._pair = overlap if plan.config.overlap else _in_sequence

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, HeldBytes]:
        losses: list[torch.Tensor] = []
        first, *others = tokens.chunk(self._parts)
        total = self._forward(first, losses)
        held = self._keeper.held()
        for part in others:
            total, _ = self._pair(partial(self._forward, part, losses), total.backward)
            held = self._keeper.held()
        total.backward()
        if self._parts > 1:
            gradients = [value.grad for value in self._model.parameters() if value.grad is not None]
            foreach_div_(gradients, self._parts)
        return torch.stack(losses).mean(), held

    def _forward(self, part: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        with self._precision():
            loss, aux = self._model(part[:, :-1], part[:, 1:])
        losses.append(loss.detach())
        return loss + aux


def _in_sequence(forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
    done = backward()
    return forward(), done


class PipelinedModel:
    """Runs the microbatches in the order of a schedule of `torch.distributed.pipelining`."""

    def __init__(
        self, plan: RunPlan, ranks: RunRanks, models: Sequence[Decoder], keeper: Keeper, precision: Precision
    ) -> None:
        assert plan.placed is not None
        config, placed = plan.config, plan.placed
        own = placed.of_rank(plan.world.pipeline_rank)
        last = len(placed.stages) - 1
        batch = config.batch // config.parts

        def example(stage: int) -> torch.Tensor:
            """A stage's input; given in advance, so that torch runs no forward to infer its shape."""
            if stage == 0:
                return torch.empty(batch, config.sequence, dtype=torch.int64, device="meta")
            if stage > last:
                return torch.empty((), device="meta", requires_grad=True)
            shape = (batch, config.sequence, plan.decoder.width)
            return torch.empty(shape, device="meta", requires_grad=True)

        stages: Any = [
            _Stage(
                precision,
                model,
                stage.index,
                last + 1,
                plan.device,
                input_args=example(stage.index),
                output_args=example(stage.index + 1),
                group=ranks.pipeline,
            )
            for stage, model in zip(own, models, strict=True)
        ]
        self._first, self._last = own[0].index == 0, own[-1].index == last
        if config.overlap:
            self._schedule = overlapped_schedule(placed.schedule, stages, config.parts, loss_fn=_given)
        else:
            kind = getattr(torch_schedules, f"Schedule{placed.schedule}")
            single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
            self._schedule = kind(stages[0] if single else stages, config.parts, loss_fn=_given)
        keeper.follow(self._schedule)
        delay_weight_gradients(self._schedule)
        self._fullest = _Fullest(keeper)
        Observation(self._schedule, self._fullest)

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, HeldBytes]:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        losses: list[torch.Tensor] = []
        ends: dict[str, Any] = {}
        if self._last:
            ends = {"target": labels, "labels": labels, "losses": losses}
        # The outputs are losses, which `losses` has already; merging them would hold more memory.
        self._schedule.step(*([inputs] if self._first else []), return_outputs=False, **ends)
        loss = torch.stack(losses).mean() if self._last else None
        return loss, self._fullest.held


def _given(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last stage returns its loss, so that no logits leave it."""
    return output


class _Stage(PipelineStage):
    """A stage whose forward runs under autocast; backward follows the dtypes of forward."""

    def __init__(self, precision: Precision, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._precision = precision

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision():
            return super().forward_one_chunk(*args, **kwargs)


class _Fullest:
    """Reads the keeper's bytes when, by the plan, the rank holds the most microbatches."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._when, self._done = 0, 0
        self.held: HeldBytes = {}

    def begin_step(self, plan: Plan) -> None:
        totals = [sum(counts.values()) for counts in plan.held()]
        self._when, self._done = totals.index(max(totals)), 0

    def end_step(self) -> None:
        pass

    def begin(self, action: Action) -> None:
        pass

    def end(self, action: Action) -> None:
        if self._done == self._when:
            self.held = self._keeper.held()
        self._done += 1
