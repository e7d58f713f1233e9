"""What a captured step reads anew in each replay, at fixed addresses: the batch and the learning rates."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pagestash.torch_internals import tree_flatten, tree_map, tree_unflatten


def as_tensors(arguments: Any) -> Any:
    """The arguments of a step with tensors in place of NumPy arrays, which a graph would have as constants."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return arguments
    return tree_map(lambda leaf: torch.tensor(leaf) if isinstance(leaf, numpy.ndarray) else leaf, arguments)


class StaticBatch:
    """Fixed buffers, into which batches are copied; what is no tensor is a constant of the graph."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], device: torch.device) -> None:
        leaves, self._tree = tree_flatten((args, kwargs))
        self._leaves = [
            torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]

    @property
    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        return tree_unflatten(self._leaves, self._tree)

    def copies(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The batch's tensors, copied to the device; checks structure, shapes and dtypes.

        From pinned memory the copy is asynchronous: the caller may refill that memory only after an event.
        """
        leaves, tree = tree_flatten((args, kwargs))
        if tree != self._tree:
            raise ValueError(
                f"the batch has the structure {tree}, but the step was captured with {self._tree}"
            )
        copies = []
        for index, (leaf, mine) in enumerate(zip(leaves, self._leaves)):
            if isinstance(mine, torch.Tensor):
                if not isinstance(leaf, torch.Tensor) or leaf.shape != mine.shape or leaf.dtype != mine.dtype:
                    got = (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
                    raise ValueError(
                        f"batch tensor {index} is {got}, but the step was captured with "
                        f"{(tuple(mine.shape), mine.dtype)}; pad to one shape, or make a second GraphedStep"
                    )
                copies.append(torch.empty_like(mine).copy_(leaf, non_blocking=True))
            elif leaf != mine:
                raise ValueError(
                    f"batch argument {index} is {leaf!r}, but the step was captured with {mine!r}; "
                    "pass a value that changes as a tensor"
                )
        return copies

    def fill(self, copies: list[torch.Tensor]) -> None:
        """Copy a batch into the buffers."""
        mine = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        for buffer, value in zip(mine, copies, strict=True):
            buffer.copy_(value)


class LearningRates:
    """Learning rates: numbers for the user and schedulers, device tensors for the graph.

    A number would be a constant of the graph, as every other setting is: fused optimizers take only the rate as a
    tensor. They read it as float32; warm-up steps use it, too, so that all steps round alike.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._device_rates = [
            torch.zeros((), dtype=torch.float32, device=group["params"][0].device) for group in self._groups
        ]
        self._constants: list[dict[str, Any]] = []

    def captured(self) -> None:
        """A graph is captured now, with the settings of now."""
        self._constants = self._settings()

    def changed(self) -> list[str]:
        """The names of other settings that have changed since the capture: the graph has the old ones."""
        pairs = zip(self._constants, self._settings())
        return sorted({name for then, now in pairs for name in now if then.get(name) != now[name]})

    def _settings(self) -> list[dict[str, Any]]:
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
