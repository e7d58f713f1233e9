"""An overflowing step changes nothing: one flag for all ranks, optimizers that obey it, state that is restored."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from pagestash.saved.keeper import Keeper
from pagestash.saved.overflow import Agreement, PoolOverflow
from pagestash.step.bounds import bounds_of
from pagestash.step.state import ProtectedState, Weights, refuse_unknown_scaler
from pagestash.torch_internals import takes_found_inf


class StepOverflowed(PoolOverflow):
    """Raised inside an eager step, by the hook before the optimizer, to end it there."""


class UpdateGuard:
    """Protects parameters, optimizer state and other state from a step that overflows.

    `flag` is a 0-d float32 on the device: the maximum of all ranks' overflow flags. In a graph it is part of
    the fused optimizers' `found_inf`, and the device selects the old or new value of protected state. In an
    eager step the host reads it before the optimizer runs.
    """

    def __init__(
        self,
        keeper: Keeper,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[GradScaler],
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.flag = torch.zeros((), dtype=torch.float32, device=device)
        self.optimizers = optimizers
        self.bounds = bounds_of(keeper)
        self.state = ProtectedState([], device)
        self._keeper = keeper
        self._scalers = scalers
        self._group = group
        self.ranks = Agreement(group)
        self._eager = False
        self._running = False
        self._armed = False
        self._reduced_at: list[int] | None = None
        self._weights: Weights | None = None
        self._theirs: dict[torch.optim.Optimizer, Any] = {}
        for optimizer in optimizers:
            # The optimizer must not keep the guard, and with it the keeper and its pool.
            for hook in (
                optimizer.register_step_pre_hook(_while_alive(self._before_update)),
                optimizer.register_step_post_hook(_while_alive(self._after_update)),
            ):
                weakref.finalize(self, hook.remove)

    def begin(self, *, eager: bool, weights: Weights | None = None) -> None:
        """Save protected state at the start of a step; in a capture the copies are part of the graph.

        With `weights`, the step is refused if it has changed one before the first update.
        """
        if self._keeper.device != self.flag.device:
            raise ValueError(
                f"the model is on {self._keeper.device}, but was on {self.flag.device} when GraphedStep was made; "
                "make GraphedStep after moving the model"
            )
        self._eager = eager
        self._running = True
        self._reduced_at = None
        self._weights = weights
        self.state.remember()

    def end(self) -> None:
        """End a step: raise if it overflowed (eager), or restore state on the device if it did (graph)."""
        self._reduce()
        if self._eager:
            self._raise_if_overflowed()
        else:
            self.state.select(self.flag > 0)
        self.leave()

    def leave(self) -> None:
        """The step is over, however it ended: later updates of the same optimizer are not guarded."""
        self._running = False

    def overflowed_before(self, error: Exception) -> bool:
        """Whether the step that raised `error` had overflowed, on any rank: the error then means nothing."""
        if self._reduced_at is None:
            self._read_flags()
            self._reduced_at = self._uses()
            if self._group is not None:
                self.flag.fill_(float(self.ranks.any(bool(self.flag), error)))
        return bool(self.flag)

    def arm(self) -> None:
        """Make every optimizer obey the flag on the device, as it obeys a gradient scaler's `found_inf`."""
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            fused = all(group.get("fused") for group in optimizer.param_groups)
            if not (fused and takes_found_inf(optimizer)):
                raise ValueError(
                    f"{name} cannot skip an update on the device: a step in a CUDA graph needs an optimizer "
                    f"that takes `found_inf`, such as torch.optim.AdamW(..., fused=True)"
                )
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True  # a fused optimizer already has its step counts on the device
        if self._group is not None and not self._armed:
            # Create the group's communicator now: a capture cannot.
            dist.all_reduce(self.flag.clone(), group=self._group)
        self._armed = True

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._running:
            return
        refuse_unknown_scaler(self._scalers)
        self._reduce()
        if self._eager:
            self._raise_if_overflowed()
        elif self._armed:
            theirs = self._theirs[optimizer] = vars(optimizer).get("found_inf")
            # A gradient scaler's flag, which also skips the update.
            both = self.flag if theirs is None else torch.maximum(self.flag, theirs)
            optimizer.found_inf = both  # type: ignore[attr-defined]

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._theirs:
            # Restore the scaler's flag, which the scaler removes itself.
            theirs = self._theirs.pop(optimizer)
            if theirs is None:
                del optimizer.found_inf  # type: ignore[attr-defined]
            else:
                optimizer.found_inf = theirs  # type: ignore[attr-defined]

    def _uses(self) -> list[int]:
        """Number of uses of each bound so far: whatever comes later could overflow again."""
        return [bound.uses for bound in self.bounds]

    def _reduce(self) -> None:
        """Reduce the flag over all ranks. Nothing stashes after this: updates come after all backwards."""
        if self._reduced_at is not None:
            if self._uses() != self._reduced_at:
                raise ValueError(
                    "train_step saves tensors, or runs a layer of bounded capacity, after an optimizer's step: if "
                    "they overflowed, that update could no longer be skipped. Put all forwards and backwards "
                    "before the updates, or use one GraphedStep for each update"
                )
            return
        if self._weights is not None:
            self._weights.refuse_written(updated=False)
        self._reduced_at = self._uses()
        self._read_flags()
        if self._group is None:
            return
        if self._eager:
            # On the host, which reads the flag next: a rank whose attempt raised takes part in the same vote.
            self.flag.fill_(float(self.ranks.any(bool(self.flag))))
        else:
            dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, group=self._group)

    def _read_flags(self) -> None:
        """The flag of this rank: the largest of all bounds'."""
        flags = [flag for bound in self.bounds if (flag := bound.flag) is not None]
        if flags:
            self.flag.copy_(flags[0])
        else:
            self.flag.zero_()
        for flag in flags[1:]:
            torch.maximum(self.flag, flag, out=self.flag)

    def _raise_if_overflowed(self) -> None:
        if bool(self.flag):
            raise StepOverflowed(
                "the pool, or a buffer of bounded capacity, overflowed on this rank or another"
            )


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls a method as long as something else refers to its object."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return hook
