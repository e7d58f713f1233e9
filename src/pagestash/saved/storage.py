"""Which bytes a saved tensor is: its storage, the range it covers, and how to see it there again.

Identity is by storage. Two operations that save the same activation, or two halves of one buffer, share an
`Entry`; a view is kept as a recipe (dtype, size, strides, offset), so that a transposed, expanded or sliced
tensor comes back as it was, without its bytes being written out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from pagestash.policy import Rule
from pagestash.torch_internals import LOCAL_PART, StorageWeakRef, buffers_of, parameters_of, storage_key

SPARSE = 2
"""A view that spans more than this many times its own bytes is packed densely rather than by range."""


class ViewRecipe(NamedTuple):
    """How a saved tensor looks at its entry's bytes; the offset counts from the storage's first byte."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    byte_offset: int

    def apply(self, found: torch.Tensor, first: int) -> torch.Tensor:
        """The view of an entry's bytes as its place gave them; the first was byte `first` of the storage."""
        dtype, size, stride, byte_offset = self
        if found.dtype is dtype and found.shape == size and found.stride() == stride:
            return found  # all of the entry; else it has other bytes than the view, or is flat
        offset = int(found.storage_offset()) * found.element_size() + byte_offset - first
        view = torch.empty(0, dtype=dtype, device=found.device)
        return view.set_(found.untyped_storage(), offset // dtype.itemsize, size, stride)

    def spread(self, flat: torch.Tensor) -> torch.Tensor:
        """The view, of its elements in order, which get the strides back."""
        elements = flat[: self.size.numel() * self.dtype.itemsize].view(self.dtype).view(self.size)
        out = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=flat.device)
        each_once = out  # what an expanded tensor repeats cannot be written twice
        for dim, stride in enumerate(self.stride):
            if not stride:
                each_once, elements = each_once.narrow(dim, 0, 1), elements.narrow(dim, 0, 1)
        each_once.copy_(elements)
        return out


class Place(Protocol):
    """Where a home has put an entry's bytes."""

    def get(self, entry: "Entry") -> torch.Tensor:
        """The entry's bytes, flat (uint8) or in the entry's `form`, as often as asked."""
        ...

    def drop(self, entry: "Entry") -> None:
        """Nothing can ask for the entry any more. Called once, from any thread."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """Bytes `first` to `last` of one storage, saved once however many operations ask for them.

    `source()` is the memory itself until a home has taken the entry; from then on `place` has its bytes. Entries
    of valid rows have `rows` (an integer on the device) and are `capacity` rows long.
    """

    storage: StorageWeakRef
    version: int
    first: int
    last: int
    origin: torch.Tensor | None  # a view that keeps the storage alive and its version in sight
    rows: torch.Tensor | None = None
    rows_version: int = 0
    capacity: int = 0
    region: str = ""
    rule: Rule | None = None
    storage_bytes: int = 0
    """Of the whole storage; 0: not looked up."""
    handles: int = 0
    waiting: int = 0  # handles that backward has not asked for yet
    spoiled: bool = False
    place: Place | None = None
    dtype: torch.dtype | None = None
    """Of its values, where these are coded in eight bits; None: its bytes are held as they are."""
    tail: bool = True
    """Whether rows past the valid ones are read, too: then codes of them come back as zeros."""
    sized: bool = False
    """Whether all its codes are moved, and not only those of valid rows."""
    form: ViewRecipe | None = None
    """Of `origin`, where its bytes are the entry's, all of them and no others."""
    views: dict[ViewRecipe, torch.Tensor] | None = None
    """What was saved of it, if the first was a thin slice: its region is not over, and others may be the rest."""
    slices: dict[ViewRecipe, int] | None = None
    """Where in its bytes each view begins, if it has the elements of these alone."""

    @property
    def length(self) -> int:
        return self.last - self.first

    def let_go(self) -> None:
        """A handle is gone. Its place hears of the last one, once, whatever thread comes between."""
        self.handles -= 1
        if not self.handles:
            place, self.place = self.place, None
            if place is not None:
                place.drop(self)

    def part(self, start: int, size: int) -> torch.Tensor:
        """`size` of the entry's bytes from byte `start` on, where they are now."""
        assert self.origin is not None, "the entry's memory was already taken"
        flat = torch.empty(0, dtype=torch.uint8, device=self.origin.device)
        return flat.set_(self.origin.untyped_storage(), self.first + start, (size,), (1,))

    def source(self) -> torch.Tensor:
        """The entry's bytes where they are now, as [capacity, row bytes] or flat."""
        flat = self.part(0, self.length)
        return flat.view(self.capacity, -1) if self.rows is not None else flat

    def here(self) -> torch.Tensor:
        """The entry's bytes where they are now, as a place gives them. (To see them flat takes 4 µs.)"""
        origin = self.origin
        return origin if self.form is not None and origin is not None else self.source().view(-1)

    def valid_bytes(self) -> int:
        """Its bytes, or those of its valid rows. Waits for the device where it has a row count."""
        if self.rows is None:
            return self.length
        return self.length // self.capacity * min(max(int(self.rows.item()), 0), self.capacity)

    def same_content(
        self, version: int, rows: torch.Tensor | None, capacity: int, first: int, last: int
    ) -> bool:
        """Whether bytes `first` to `last` as saved now are those that this entry holds."""
        if self.rows is None:
            return self.covers(version, first, last)
        return (
            (self.version, self.first, self.last, self.capacity) == (version, first, last, capacity)
            and self.rows is rows
            and not self.rows_moved()
        )

    def covers(self, version: int, first: int, last: int) -> bool:
        """Whether its range takes in bytes `first` to `last`, as they were at `version`."""
        inside = self.version == version and self.first <= first and last <= self.last
        return inside and self.slices is None

    def take_all(self) -> None:
        """Hold every row: not only the valid ones are read."""
        self.rows, self.rows_version, self.capacity, self.form = None, 0, 0, None
        if self.dtype is None:
            self.first -= self.first % 16

    def widen(self, version: int, first: int, last: int, size: int) -> bool:
        """Cover bytes `first` to `last`, too, of which `size` are a view's, if that takes in little else."""
        if self.version != version or self.rows is not None:
            return False
        low, high = min(self.first, first), max(self.last, last)
        alone = last - first
        if self.views is None and alone > SPARSE * size:
            alone = size  # it would be copied
        if high - low > self.length + alone:
            return False
        self.first, self.last, self.form = low, high, None
        return True

    def hold_slices(self) -> None:
        """If what was saved is a small part of its range, hold a copy of that alone."""
        views, self.views = self.views, None
        if views is None or self.length <= SPARSE * sum(view.nbytes for view in views.values()):
            return
        parts, self.slices, at = [], {}, 0
        for recipe, view in views.items():
            flat = view.contiguous().view(-1).view(torch.uint8)
            parts.append(nn.functional.pad(flat, (0, -len(flat) % 16)) if len(flat) % 16 else flat)
            self.slices[recipe] = at
            at += len(parts[-1])
        self.origin = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.version, self.first, self.last = self.origin._version, 0, at
        self.storage_bytes = at

    def rows_moved(self) -> bool:
        """Whether the row count was refilled since the entry was made."""
        return self.rows is not None and self.rows._version != self.rows_version


def byte_range(tensor: torch.Tensor, nbytes: int | None = None) -> tuple[int, int]:
    """First byte and end of the storage bytes that the tensor's elements lie in. `nbytes` are its own, if known."""
    item = tensor.element_size()
    first = int(tensor.storage_offset()) * item
    if tensor.is_contiguous():  # so is what has no elements
        return first, first + (tensor.nbytes if nbytes is None else nbytes)
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        span += (size - 1) * stride
    return first, first + int(span) * item


class SavedView(NamedTuple):
    """A tensor that is being saved: bytes `first` to `last` of storage `key`, as they are at `version`."""

    tensor: torch.Tensor
    key: int
    version: int
    first: int
    last: int

    def recipe(self) -> ViewRecipe:
        tensor = self.tensor
        return _recipe((tensor.dtype, tensor.shape, tensor.stride(), self.first))


# Each makes one of its fields, in half the time: one of each is made for every saved tensor that moves.
saved_view: Callable[[tuple[torch.Tensor, int, int, int, int]], SavedView] = partial(tuple.__new__, SavedView)
_recipe: Callable[[tuple[torch.dtype, torch.Size, tuple[int, ...], int]], ViewRecipe] = partial(
    tuple.__new__, ViewRecipe
)


def row_range(tensor: torch.Tensor, capacity: int) -> tuple[int, int] | None:
    """The whole rows that the tensor lies in, where it has `capacity` of them, else None.

    The rows may be transposed, and the tensor may be a slice of their width: the two halves of a gated
    projection lie in the same rows, and are then one entry.
    """
    if not tensor.ndim:
        return None
    outer = max(range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.size(dim)))
    row_bytes = tensor.stride(outer) * tensor.element_size()
    if tensor.size(outer) != capacity or row_bytes == 0:
        return None
    first, last = byte_range(tensor)
    start = first - first % row_bytes
    end = start + capacity * row_bytes
    return (start, end) if last <= end <= tensor.untyped_storage().nbytes() else None


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor | None:
    """A number on the tensor's device that its bytes decide; None for elements without a view as integers.

    Rows are summed, and the sums weighed by their place: two rows that changed places make another number.
    """
    integers = _AS_INTEGERS.get(tensor.element_size())
    if integers is None:
        return None
    values = tensor.detach().view(integers)
    sums = values.sum(-1, dtype=torch.int64).flatten() if values.ndim > 1 else values.flatten()
    return (sums * (2 * torch.arange(sums.numel(), device=sums.device) + 1)).sum()


PLAIN_TENSORS, STRIDED = (torch.Tensor, nn.Parameter), torch.strided
"""Types and layout of tensors with plain memory."""


def storage_keys(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    """The storages that `tensors` live in now; those of subclasses without one (DTensor) by their local part."""
    found = set()
    for tensor in tensors:
        if tensor is not None:
            local = tensor if type(tensor) in PLAIN_TENSORS else getattr(tensor, LOCAL_PART, tensor)
            if local.layout is STRIDED:  # a sparse one has no storage of its own
                found.add(storage_key(local))
    return found


def parameter_keys(modules: Iterable[nn.Module]) -> set[int]:
    """The storages that the modules' own parameters live in now."""
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        tensors += parameters_of(module).values()
    return storage_keys(tensors)


def buffer_keys(modules: Iterable[nn.Module]) -> set[int]:
    """The storages that the modules' own buffers live in now."""
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        own = buffers_of(module)
        if own:
            tensors += own.values()
    return storage_keys(tensors) if tensors else set()


def is_nested(tensor: torch.Tensor) -> bool:
    """Whether it is nested, and not jagged: it has no shape, and its values are in a buffer that is not seen."""
    return tensor.is_nested and tensor.layout is STRIDED


def plain_storage(tensor: torch.Tensor) -> int | None:
    """The storage of a tensor with plain memory; None for a subclass, a nested tensor or a sparse one."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not STRIDED or is_nested(tensor):
        return None
    return storage_key(tensor)
