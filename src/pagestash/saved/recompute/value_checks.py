"""Whether recomputed tensors have the values of the first forward.

Versions and shapes do not tell that a forward read something else, or drew other numbers. Values do, and a check
costs as much as reading them. So every forward of a region is checked in the first step that it is in, both in
training and in evaluation; there the host waits for the answer. From then on one forward in `EVERY` is checked; a
later forward reads the answer.

Indices and masks must be the same. Floating-point values are the same on the same machine, except where a kernel
adds in any order (atomics). They are compared by sums over groups of elements, and refused where a sum is further
off than rounding explains.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.storage import checksum
from pagestash.saved.streams import capturing, is_done
from pagestash.torch_internals import is_replica

EVERY = 256
"""Forwards of a region from one check to the next. A check reads what the region discards four times, which is less
than its forward and backward read; 1/256 of that is below half a percent of the region's time."""
_SPREAD = 97
"""Regions take turns: from one to the next, the check comes this many forwards later."""

_GROUP = 128
"""Elements in a sum. The sums of unrelated values differ by a sixth of the sum of absolute values; in a larger
group they would differ by less."""
_FEWEST = 8
"""With fewer elements a sum may be near zero by chance, and consist of rounding only."""
_ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
"""How far a sum may be off, relative to the sum of absolute values: twice the effect of rounding each element once,
all in the same direction. (2⁻¹¹ for wider types, because what they were computed from may have been rounded.)"""


class When(Enum):
    """Whether a forward is checked, and whether the host waits for the answer."""

    NEVER = 0
    AT_ONCE = 1
    LATER = 2


@dataclass(slots=True, eq=False)
class _Pending:
    differs: torch.Tensor
    known: torch.cuda.Event
    message: str


@dataclass(slots=True, eq=False)
class _Forwards:
    """Forwards of one module so far, and whether this is the first step that it is in, training or not."""

    count: int
    modes: set[bool] = field(default_factory=set)
    """Values of `training` that it had in a forward. (In another mode it may draw, or change a buffer.)"""
    new: bool = True


class Checks:
    """Says which forwards are checked, and raises what a check found."""

    def __init__(self) -> None:
        self.overflow: Callable[[], torch.Tensor | None] = lambda: None
        """A flag on the device: the pool overflowed, inputs may be a refused group's zeros, the step is rerun."""
        self._forwards: WeakKeyDictionary[nn.Module, _Forwards] = WeakKeyDictionary()
        self._new: list[_Forwards] = []
        self._pending: deque[_Pending] = deque()
        self._of_step: list[tuple[torch.Tensor, str]] = []
        """Flags on the device, and what to say if one is set."""

    def due(self, module: nn.Module) -> When:
        """Whether the forward of `module` that begins now is checked; raises what an earlier check has found."""
        # (A replica of DataParallel's is a new module in every step.)
        if is_replica(module) or capturing():
            return When.NEVER
        self._settle()
        forwards = self._forwards.get(module)
        if forwards is None:
            forwards = self._forwards[module] = _Forwards(len(self._forwards) * _SPREAD % EVERY)
        if module.training not in forwards.modes:
            forwards.modes.add(module.training)
            forwards.new = True
            self._new.append(forwards)
        if forwards.new:
            return When.AT_ONCE
        forwards.count += 1
        return When.LATER if forwards.count % EVERY == 0 else When.NEVER

    def step_over(self) -> None:
        for forwards in self._new:
            forwards.new = False
        self._new.clear()

    def at_end(self, wrong: torch.Tensor, message: str) -> None:
        """Raise `message` when the step has come to its end, if the flag `wrong` is set."""
        self._of_step.append((wrong, message))

    def raise_found(self) -> None:
        """The step has come to its end. Waits for the device if there is a flag."""
        noted, self._of_step = self._of_step, []
        for wrong, message in noted:
            if bool(wrong):
                raise RuntimeError(message)

    def give_up(self) -> None:
        """The step ended by an exception."""
        self._of_step.clear()

    def compare(self, summary: torch.Tensor, tensor: torch.Tensor, when: When, message: str) -> None:
        """Raise `message` if `tensor` has other values than the tensor of `summary` had, now or later."""
        if capturing():
            return
        differs = differ(summary, tensor)
        if when is When.LATER and differs.is_cuda:
            answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            answer.copy_(self._unexcused(differs), non_blocking=True)
            known = torch.cuda.Event()
            known.record()
            self._pending.append(_Pending(answer, known, message))
        elif bool(differs):
            raise RuntimeError(message)

    def _unexcused(self, differs: torch.Tensor) -> torch.Tensor:
        # (An error that is raised at once is caught by whoever opened the step, who asks for the overflow first.)
        overflow = self.overflow()
        return differs if overflow is None else differs & (overflow.view(()) == 0)

    def _settle(self) -> None:
        while self._pending and is_done(self._pending[0].known):
            found = self._pending.popleft()
            if bool(found.differs):
                self._pending.clear()
                raise RuntimeError(f"in an earlier step: {found.message}")


def summary_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What other values are compared with: a checksum of indices and masks, sums of floating-point values.

    None for what is not compared. (A generator's state, which operations save as one or two integers, may be
    anything where it is not used; bytes may be a kernel's workspace.)
    """
    if tensor.dtype in (torch.bool, torch.int32, torch.int64):
        return checksum(tensor) if tensor.numel() > 2 else None
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() < _FEWEST:
        return None
    return _sums(tensor)


def differ(summary: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Whether the tensor has other values than the one that `summary` is of: a flag on its device."""
    if not summary.is_floating_point():
        found = checksum(tensor)
        assert found is not None
        return found != summary
    found = _sums(tensor)
    size = torch.where(summary[1].isfinite(), summary[1], 0.0)
    bound = _ROUNDING.get(tensor.dtype, 0.25 if tensor.element_size() == 1 else 2.0**-11) * (
        size + size.mean()
    )
    close = (found - summary).abs() <= bound
    alike = close | (found == summary) | (found.isnan() & summary.isnan())
    return ~alike.all()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """For each group of neighbours: the sum of its elements, and of their absolute values."""
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if values.element_size() == 1:
        values = values.float()
    last = values.shape[-1]
    if last < _GROUP:
        # The absolute values of a short row say little about its rounding.
        values = values.flatten()
        last = values.numel()
    size = next((size for size in range(_GROUP, _GROUP // 4, -1) if last % size == 0), last)
    groups = values.unflatten(-1, (-1, size))
    sums = groups.sum(-1, dtype=torch.float64)
    sizes = torch.linalg.vector_norm(groups, 1, -1, dtype=torch.float64)
    return torch.stack((sums.flatten(), sizes.flatten()))
