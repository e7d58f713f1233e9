"""Whether recomputed tensors have the values of the first forward.

Versions and shapes do not tell that a forward read something else, or drew other numbers. Values do, and a check
costs as much as reading them. So every forward of a region is checked in the first step that it is in, both in
training and in evaluation; the host waits for the answer. With `Keeper(check=True)` so is every other.

Indices and masks must be the same. Floating-point values are the same on the same machine, except where a kernel
adds in any order (atomics). They are compared by sums over groups of elements, and refused where a sum is further
off than rounding explains.
"""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.saved.storage import checksum
from pagestash.saved.streams import capturing

_GROUP = 128
"""Elements in a sum. The sums of unrelated values differ by a sixth of the sum of absolute values; in a larger
group they would differ by less."""
_FEWEST = 8
"""With fewer elements a sum may be near zero by chance, and consist of rounding only."""
_ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
"""How far a sum may be off, relative to the sum of absolute values: twice the effect of rounding each element once,
all in the same direction. (2⁻¹¹ for wider types, because what they were computed from may have been rounded.)"""


class Checks:
    """Says which forwards are checked, and raises what a check found."""

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._modes: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()
        """Values of `training` that a module had in earlier steps. (In another it may draw, or change a buffer.)"""
        self._new: list[tuple[nn.Module, bool]] = []
        self._of_step: list[tuple[torch.Tensor, str]] = []
        """Flags on the device, and what to say if one is set."""

    def due(self, module: nn.Module) -> bool:
        """Whether the forward of `module` that begins now is checked."""
        if capturing():
            return False
        if module.training not in self._modes.setdefault(module, set()):
            self._new.append((module, module.training))
            return True
        return self._always

    def step_over(self) -> None:
        for module, training in self._new:
            self._modes[module].add(training)
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

    def compare(self, summary: torch.Tensor, tensor: torch.Tensor, message: str) -> None:
        """Raise `message` if `tensor` has other values than the tensor of `summary` had."""
        if not capturing() and bool(differ(summary, tensor)):
            raise RuntimeError(message)


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
