"""An overflowing step changes nothing: the flag over all ranks, optimizers that heed it, state that is put back."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from pagestash.saved.keeper import Keeper
from pagestash.saved.overflow import PoolOverflow


class Bounded(Protocol):
    """A module whose buffers bound something that only the device counts, such as rows received.

    `over_capacity` is 0-d float32, 1 once the bound was passed; `grow_capacity` raises the bound to what was
    wanted (every rank of its group calls it together, and it may wait) and tells whether it did.
    """

    over_capacity: torch.Tensor

    def grow_capacity(self) -> bool: ...

    def clear_over_capacity(self) -> None: ...


class StepOverflowed(PoolOverflow):
    """Raised inside an eager step, by the hook before the optimizer, to end it there."""


class UpdateGuard:
    """Keeps parameters, optimizer state and other state as they were when a step overflows.

    `flag` is 0-d float32 on the device: the largest of all ranks' overflow flags. In a graph it is the fused
    optimizers' `found_inf`, and protected state is selected on the device; eagerly the host looks at it
    before the optimizer runs.
    """

    def __init__(
        self,
        keeper: Keeper,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.flag = torch.zeros((), dtype=torch.float32, device=device)
        self.optimizers = optimizers
        found = [cast(Bounded, module) for module in keeper.modules() if hasattr(module, "grow_capacity")]
        # A layer and the part of it that is bounded may both answer, with one flag between them.
        self.bounded = list({id(module.over_capacity): module for module in found}.values())
        self._keeper = keeper
        self._group = group
        self._eager = False
        self._reduced_at: int | None = None
        self._state: list[torch.Tensor] = []
        self._shadow: list[torch.Tensor] = []
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)

    def protect(self, state: Iterable[torch.Tensor]) -> None:
        """Name the tensors that a step may change and an overflowing one must not; makes room to copy them."""
        self._state = list(state)
        if [(t.shape, t.dtype) for t in self._shadow] != [(t.shape, t.dtype) for t in self._state]:
            self._shadow = [torch.empty_like(tensor) for tensor in self._state]

    def begin(self, *, eager: bool) -> None:
        """Remember protected state at the start of a step; in a graph these are launches of the graph."""
        self._eager = eager
        self._reduced_at = None
        for shadow, tensor in zip(self._shadow, self._state):
            shadow.copy_(tensor)

    def end(self) -> None:
        """The end of a step: raise if it overflowed (eager), or put state back where it did (graph)."""
        self._reduce()
        if self._eager:
            self._raise_if_overflowed()
            return
        skip = self.flag > 0
        for shadow, tensor in zip(self._shadow, self._state):
            tensor.copy_(torch.where(skip, shadow, tensor))

    def roll_back(self) -> None:
        """Put remembered state back."""
        for shadow, tensor in zip(self._shadow, self._state):
            tensor.copy_(shadow)

    def arm(self) -> None:
        """Make every optimizer heed the flag on the device, as it heeds a gradient scaler's `found_inf`."""
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            fused = all(group.get("fused") for group in optimizer.param_groups)
            if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False)):
                raise ValueError(
                    f"{name} cannot leave out an update on the device: a step in a CUDA graph needs an optimizer "
                    f"that takes `found_inf`, such as torch.optim.AdamW(..., fused=True)"
                )
            optimizer.found_inf = self.flag  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True  # a fused optimizer's step counts are on the device already

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._reduce()
        if self._eager:
            self._raise_if_overflowed()

    def _reduce(self) -> None:
        """The flag over all ranks. Every stash of the step is behind us: updates come after backward."""
        if self._reduced_at is not None:
            if self._keeper.reservations != self._reduced_at:
                raise ValueError(
                    "train_step saves tensors after an optimizer's step: had they overflowed, that update could no "
                    "longer be left out. Put all forwards and backwards before the updates, or use one "
                    "GraphedStep for each update"
                )
            return
        self._reduced_at = self._keeper.reservations
        overflow = self._keeper.overflow
        if overflow is None:
            self.flag.zero_()
        else:
            self.flag.copy_(overflow)
        for module in self.bounded:
            torch.maximum(self.flag, module.over_capacity, out=self.flag)
        if self._group is not None:
            dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, group=self._group)

    def _raise_if_overflowed(self) -> None:
        if bool(self.flag):
            raise StepOverflowed(
                "the pool, or a buffer of bounded capacity, overflowed on this rank or another"
            )
