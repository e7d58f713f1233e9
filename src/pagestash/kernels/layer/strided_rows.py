"""Rows of a tensor where they lie in memory, for kernels that read them there.

Heads of one token stand side by side, and tokens a whole projection apart: rows in groups, with a step within a
group and another from group to group.
"""

from typing import NamedTuple

from torch import Tensor

HEADS = 256
"""Rows of a group at most. A group of more is no token's heads, but a sequence, and kernels would be compiled for
each length."""


class StridedRows(NamedTuple):
    """Rows of d elements in memory, in groups."""

    at: Tensor
    number: int
    """Of rows."""
    together: int
    """Rows of a group. Kernels are compiled for it: a division for each row is what they have no time for."""
    apart: int
    """Elements from one group to the next."""
    step: int
    """Elements from one row of a group to the next."""


def rows_of(x: Tensor, width: int) -> StridedRows:
    """`x` in memory; a slice of a wider projection, or some of its heads, needs no copy."""
    if x.is_contiguous():  # nearly always, and it saves the host the rest
        return StridedRows(x, x.numel() // width, 1, width, 0)
    levels: list[tuple[int, int]] = []
    for size, step in zip(x.shape[:-1], x.stride()):
        if levels and levels[-1][1] == size * step:
            levels[-1] = levels[-1][0] * size, step
        elif size != 1:
            levels.append((size, step))
    groups, apart = levels[0] if levels else (1, 0)
    together, step = levels[1] if len(levels) > 1 else (1, 0)
    if len(levels) > 2 or together > HEADS or (x.stride(-1) != 1 and width != 1):
        return rows_of(x.contiguous(), width)
    return StridedRows(x, groups * together, together, apart, step)
