"""Learning rates of a captured step: numbers for the user and schedulers, device tensors for the graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class LearningRates:
    """Device tensors that a graph reads its learning rates from, written before each replay.

    A number would be a constant of the graph. Fused optimizers read the tensor as float32; warm-up steps use
    it, too, so that all steps round alike.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._device_rates = [
            torch.zeros((), dtype=torch.float32, device=group["params"][0].device) for group in self._groups
        ]

    def constants(self) -> list[dict[str, Any]]:
        """Every other setting of the groups: constants of the graph, which is captured again if one changes."""
        return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in self._groups]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this context the groups' rates are the tensors; afterwards the user's values are back."""
        theirs = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._device_rates):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(self._groups, theirs):
                group["lr"] = rate

    def read(self) -> list[torch.Tensor | float]:
        """The rates that the user has set."""
        return [
            rate.detach().clone() if isinstance(rate := group["lr"], torch.Tensor) else float(rate)
            for group in self._groups
        ]

    def write(self, rates: Sequence[torch.Tensor | float]) -> None:
        """Write rates to the tensors that the graph reads; launches only, no wait."""
        for mine, rate in zip(self._device_rates, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                mine.copy_(rate, non_blocking=True)
            else:
                mine.fill_(rate)
