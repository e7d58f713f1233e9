"""Whether what was made again has the values of the first time.

Versions and shapes do not tell that a forward read something else, or drew other numbers. Values do, and looking at
them costs as much as reading them. So a region is checked in the first step that it is in, where the host waits for
the answer, and from then on one run in `EVERY`; the answer is then read when it is there, in a later run.

Indices and masks must be the same. Floating-point values are the same on the same machine, but for kernels that add
in any order (atomics): they are compared by their sums over groups of elements, and refused where a sum is so far
off that rounding does not explain it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from pagestash.saved.storage import checksum
from pagestash.saved.streams import capturing, is_done

EVERY = 256
"""Runs of a region from one check to the next. A check reads what the region drops four times, less than its
forward and backward do; a two hundred and fifty-sixth of that is below half a percent of the region's time."""
_SPREAD = 97
"""Regions take turns: the next one's check comes so many runs later."""

_GROUP = 128
"""Elements in a sum. Values that have nothing to do with the first ones differ by a sixth of their size in such a
sum; the sums of a larger group would be closer."""
_FEWEST = 8
"""Fewer elements may be a sum that comes out near zero by chance, of which nothing but rounding is left."""
_ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
"""How far a sum may be off, relative to the size of what was summed: twice what one rounding of each element, all
in the same direction, would do. (2⁻¹¹ for wider types, which were computed from values that rounded, too.)"""


class When(Enum):
    """Whether a run is checked, and who waits for the answer."""

    NEVER = 0
    AT_ONCE = 1
    LATER = 2


@dataclass(slots=True, eq=False)
class _Pending:
    differs: torch.Tensor
    known: torch.cuda.Event
    message: str


class Checks:
    """Says which runs are checked, and raises what they found."""

    def __init__(self) -> None:
        self.overflow: Callable[[], torch.Tensor | None] = lambda: None
        """A flag on the device: what a region took in may be a refused group's zeros, and the step is run again."""
        self._runs: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._new: WeakSet[nn.Module] = WeakSet()
        self._pending: deque[_Pending] = deque()

    def due(self, module: nn.Module) -> When:
        """Whether the run of `module` that begins now is checked; raises what an earlier one has found."""
        # (A replica of DataParallel's is a new module in every step.)
        if capturing() or getattr(module, "_is_replica", False):
            return When.NEVER
        self._settle()
        if module in self._new:
            return When.AT_ONCE
        count = self._runs.get(module)
        if count is None:
            self._runs[module] = len(self._runs) * _SPREAD % EVERY
            self._new.add(module)
            return When.AT_ONCE
        self._runs[module] = count + 1
        return When.LATER if (count + 1) % EVERY == 0 else When.NEVER

    def step_over(self) -> None:
        self._new.clear()

    def compare(self, mark: torch.Tensor, tensor: torch.Tensor, when: When, message: str) -> None:
        """Raise an error if `tensor` has other values than `mark` was made of, now or later."""
        if capturing():
            return
        differs = differ(mark, tensor)
        if when is When.LATER and differs.is_cuda:
            answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            answer.copy_(self._unexcused(differs), non_blocking=True)
            known = torch.cuda.Event()
            known.record()
            self._pending.append(_Pending(answer, known, message))
        elif bool(differs):
            raise RuntimeError(message)

    def _unexcused(self, differs: torch.Tensor) -> torch.Tensor:
        # (An error that is raised at once is looked at by whoever opened the step.)
        overflow = self.overflow()
        return differs if overflow is None else differs & (overflow.view(()) == 0)

    def _settle(self) -> None:
        while self._pending and is_done(self._pending[0].known):
            found = self._pending.popleft()
            if bool(found.differs):
                self._pending.clear()
                raise RuntimeError(f"in an earlier step: {found.message}")


def mark_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A summary of the values to compare others with; None for values that are not worth it.

    Indices and masks have a checksum. (A generator's state, which operations save as one or two integers, may be
    anything where it is not used; bytes may be a kernel's workspace.)
    """
    if tensor.dtype in (torch.bool, torch.int32, torch.int64):
        return checksum(tensor) if tensor.numel() > 2 else None
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() < _FEWEST:
        return None
    return _sums(tensor)


def differ(mark: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Whether the tensor has other values than `mark` was made of: a flag on its device."""
    if not mark.is_floating_point():
        found = checksum(tensor)
        assert found is not None
        return found != mark
    found = _sums(tensor)
    size = torch.where(mark[1].isfinite(), mark[1], 0.0)
    bound = _ROUNDING.get(tensor.dtype, 0.25 if tensor.element_size() == 1 else 2.0**-11) * (
        size + size.mean()
    )
    close = (found - mark).abs() <= bound
    alike = close | (found == mark) | (found.isnan() & mark.isnan())
    return ~alike.all()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """For each group of neighbours: the sum of its elements, and of their sizes."""
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if values.element_size() == 1:
        values = values.float()
    last = values.shape[-1]
    if last < _GROUP:
        # The sizes of a row that is short say little of its own rounding.
        values = values.flatten()
        last = values.numel()
    size = next((size for size in range(_GROUP, _GROUP // 4, -1) if last % size == 0), last)
    groups = values.unflatten(-1, (-1, size))
    sums = groups.sum(-1, dtype=torch.float64)
    sizes = torch.linalg.vector_norm(groups, 1, -1, dtype=torch.float64)
    return torch.stack((sums.flatten(), sizes.flatten()))
