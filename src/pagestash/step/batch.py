"""A step's arguments: tensors copied into fixed buffers, everything else a constant."""

from typing import Any

import torch

from pagestash.torch_internals import tree_flatten, tree_unflatten


class StaticBatch:
    """Buffers of one shape that batches are copied into, so that a captured graph finds them."""

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
        """The batch's tensors, copied to the device; checks the shapes.

        From pinned memory the copy is asynchronous: refill it only after an event, as with any such copy.
        """
        leaves, tree = tree_flatten((args, kwargs))
        if tree != self._tree:
            raise ValueError(f"the batch has the structure {tree}, the captured step {self._tree}")
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
                    f"batch argument {index} is {leaf!r}, but {mine!r} is part of the captured step; "
                    "pass what changes as a tensor"
                )
        return copies

    def fill(self, copies: list[torch.Tensor]) -> None:
        """Put a batch into the buffers."""
        mine = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        for buffer, value in zip(mine, copies, strict=True):
            buffer.copy_(value)
