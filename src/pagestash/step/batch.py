"""The arguments of a captured step: tensors are copied into fixed buffers, everything else is a constant."""

from typing import Any

import torch

from pagestash.torch_internals import tree_flatten, tree_unflatten


class StaticBatch:
    """Fixed buffers, at the addresses that the captured graph reads, into which batches are copied."""

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
