"""An overflowing step changes nothing: the flag over all ranks, optimizers that heed it, state that is put back."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from pagestash.saved.compiled import hidden
from pagestash.saved.keeper import Keeper
from pagestash.saved.module_hook import Hook
from pagestash.saved.overflow import Agreement, PoolOverflow
from pagestash.step.scaling import Scalers
from pagestash.step.state import ProtectedState
from pagestash.torch_internals import takes_found_inf


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

    `flag` is 0-d float32 on the device: the largest of all ranks' overflow flags. In a graph it joins the fused
    optimizers' `found_inf`, and protected state is selected on the device; eagerly the host looks at it
    before the optimizer runs.
    """

    def __init__(
        self,
        keeper: Keeper,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Scalers,
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.flag = torch.zeros((), dtype=torch.float32, device=device)
        self.optimizers = optimizers
        found = [cast(Bounded, module) for module in keeper.modules() if hasattr(module, "grow_capacity")]
        # A layer and the part of it that is bounded may both answer, with one flag between them.
        self.bounded = list({id(module.over_capacity): module for module in found}.values())
        self.state = ProtectedState([], device)
        self._keeper = keeper
        self._scalers = scalers
        self._group = group
        self._ranks = Agreement(group)
        self._eager = False
        self._running = False
        self._armed = False
        self._reduced_at: tuple[int, int] | None = None
        self.bounded_forwards = 0
        self._theirs: dict[torch.optim.Optimizer, Any] = {}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        for module in self.bounded:
            cast(torch.nn.Module, module).register_forward_pre_hook(_CountForward(self))

    def begin(self, *, eager: bool) -> None:
        """Remember protected state at the start of a step; in a graph these are launches of the graph."""
        if self._keeper.device != self.flag.device:
            raise ValueError(
                f"the model is on {self._keeper.device}, and was on {self.flag.device} when GraphedStep was made; "
                "make it when the model is where it will run"
            )
        self._eager = eager
        self._running = True
        self._reduced_at = None
        self.state.remember()

    def end(self) -> None:
        """The end of a step: raise if it overflowed (eager), or put state back where it did (graph)."""
        self._reduce()
        if self._eager:
            self._raise_if_overflowed()
        else:
            self.state.select(self.flag > 0)
        self.leave()

    def leave(self) -> None:
        """The step is over, however it ended: updates of the same optimizer elsewhere are not its business."""
        self._running = False

    def overflowed_before(self, error: Exception) -> bool:
        """Whether `error` came out of a step that overflowed, on this rank or another: it means nothing then."""
        if self._reduced_at is None:
            self._read_flags()
            self._reduced_at = self._taken()
            if self._group is not None:
                self.flag.fill_(float(self._ranks.any(bool(self.flag), error)))
        return bool(self.flag)

    def arm(self) -> None:
        """Make every optimizer heed the flag on the device, as it heeds a gradient scaler's `found_inf`."""
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            fused = all(group.get("fused") for group in optimizer.param_groups)
            if not (fused and takes_found_inf(optimizer)):
                raise ValueError(
                    f"{name} cannot leave out an update on the device: a step in a CUDA graph needs an optimizer "
                    f"that takes `found_inf`, such as torch.optim.AdamW(..., fused=True)"
                )
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True  # a fused optimizer's step counts are on the device already
        if self._group is not None and not self._armed:
            dist.all_reduce(self.flag.clone(), group=self._group)  # its communicator is no part of a graph
        self._armed = True

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._running:
            return
        self._scalers.check_caller()
        self._reduce()
        if self._eager:
            self._raise_if_overflowed()
        elif self._armed:
            theirs = self._theirs[optimizer] = vars(optimizer).get("found_inf")
            # A gradient scaler's, which leaves an update out just as ours does.
            both = self.flag if theirs is None else torch.maximum(self.flag, theirs)
            optimizer.found_inf = both  # type: ignore[attr-defined]

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._theirs:
            # As it was: a scaler takes its own away again.
            theirs = self._theirs.pop(optimizer)
            if theirs is None:
                del optimizer.found_inf  # type: ignore[attr-defined]
            else:
                optimizer.found_inf = theirs  # type: ignore[attr-defined]

    def _taken(self) -> tuple[int, int]:
        """What so far could overflow: groups that asked for pages, and forwards of modules with a capacity."""
        return self._keeper.reservations, self.bounded_forwards

    def _reduce(self) -> None:
        """The flag over all ranks. Every stash of the step is behind us: updates come after backward."""
        if self._reduced_at is not None:
            if self._taken() != self._reduced_at:
                raise ValueError(
                    "train_step saves tensors after an optimizer's step, or runs a layer of bounded capacity: had "
                    "they overflowed, that update could no longer be left out. Put all forwards and backwards "
                    "before the updates, or use one GraphedStep for each update"
                )
            return
        self._reduced_at = self._taken()
        self._read_flags()
        if self._group is None:
            return
        if self._eager:
            # By the host, which is about to look: a rank whose attempt failed takes part in the same vote.
            self.flag.fill_(float(self._ranks.any(bool(self.flag))))
        else:
            dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, group=self._group)

    def _read_flags(self) -> None:
        """The flag of this rank."""
        overflow = self._keeper.overflow
        if overflow is None:
            self.flag.zero_()
        else:
            self.flag.copy_(overflow)
        for module in self.bounded:
            torch.maximum(self.flag, module.over_capacity, out=self.flag)

    def _raise_if_overflowed(self) -> None:
        if bool(self.flag):
            raise StepOverflowed(
                "the pool, or a buffer of bounded capacity, overflowed on this rank or another"
            )


class _CountForward(Hook):
    """Before the forward of a module with a capacity: one more that could overflow."""

    def __init__(self, guard: UpdateGuard) -> None:
        self._guard = guard

    @hidden
    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._guard.bounded_forwards += 1
