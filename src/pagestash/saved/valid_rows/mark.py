"""A mark, and what the marks of an operation's operands lead to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagestash.torch_internals import StorageWeakRef


class Valid(NamedTuple):
    """The rows that a saved tensor lies in: bytes `first` to `last` of the storage, `rows` of them valid."""

    rows: torch.Tensor
    capacity: int
    first: int
    last: int
    dim: int = 0
    """Where the saved tensor has its rows."""
    number: int | None = None
    """Of the node after the one that saves it, which is still to be seen; None if the region says that it may."""
    function: bool = False
    """It was marked inside a custom function, which says that it may."""


@dataclass(slots=True, eq=False)
class Mark:
    """`rows` of `capacity` rows are valid in one storage, from byte `start` on, as it was at `version`."""

    storage: StorageWeakRef
    version: int
    rows: torch.Tensor
    rows_version: int
    capacity: int
    start: int
    row_bytes: int
    function: int | None = None
    """If it was made where gradients are off, as in a custom function: the number of the next node."""

    @property
    def last(self) -> int:
        return self.start + self.capacity * self.row_bytes

    def dim_of(self, tensor: torch.Tensor) -> int | None:
        """The dimension in which a view of the storage has the marked rows; None if it is none of them whole."""
        size = tensor.element_size()
        end = int(tensor.storage_offset()) * size - self.start + size  # of its elements within a row
        if end < size or not tensor.numel():
            return None
        found = None
        for dim, (count, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            if found is None and count == self.capacity and stride * size == self.row_bytes:
                found = dim
            else:
                end += (count - 1) * stride * size
        return found if end <= self.row_bytes else None

    def agrees(self, other: "Mark") -> bool:
        return self.rows is other.rows and self.capacity == other.capacity


@dataclass(slots=True, eq=False)
class Effect:
    """What a row-wise operation does with its operands' marks."""

    mark: Mark
    dim: int
    """Where its results have the rows, counted from the last dimension: -1 and less."""
    safe: set[int]
    """Storages of operands that its backward reads row by row, and may read as zero past the valid ones."""
    unsafe: set[int]
    sums: bool = False
    """Whether its backward sums over the rows, for a gradient that has none."""
    ends: torch.Tensor | None = None
    """Where each group's rows end: what lies past the last is not read, and gets garbage for a gradient."""


@dataclass(slots=True, eq=False)
class Unsettled:
    """A saved tensor whose reader is still to be seen."""

    key: int
    region: str
    shape: torch.Size
    whole: Callable[[], None]
    """Saves all of it after all."""
    number: int
    """Of the next node, when it was saved."""
