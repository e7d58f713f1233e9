"""Marks: which buffers have valid rows, and which saved tensors may therefore be cut to them.

A mark says of a buffer that its first `rows` rows are valid, and that no gradient reaches the others. It belongs
to a storage at one version, never to a tensor object. What is computed from it row by row is marked, too
(`operations.py` has the table); everything else is not.

A saved tensor is cut only on evidence that its reader is row-wise as well. Autograd saves an operation's inputs
just before that operation is dispatched and its results just after, so a saved tensor first *waits*: the next
operation, if it takes the tensor in, or the last one, if the tensor is its result, settles it. No other node may be
made in between, which the number of the next one tells. A custom function makes its node before its forward runs,
and saves after it: so it is not taken for an operation of its forward, or for the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagestash.saved.rows.gradient_check import expect_garbage, watch_gradient
from pagestash.saved.storage import plain_storage
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


class Marks:
    """The marks of one keeper's step."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self.any = False
        """Whether there is a mark. (Asked for every saved tensor.)"""
        self.paused = False
        """The operations that run now are not the model's."""
        self.watched = 0
        """How many of the regions that we are in have `operations.py` look at their operations."""
        self.checking = False
        self.checked = 0
        self._marks: dict[int, list[Mark]] = {}
        self._waiting: list[Unsettled] = []
        self._last_effect: Effect | None = None
        self._last_results: list[torch.Tensor] = []
        self._last_keys: set[int] = set()
        self._last_number: int | None = None
        self._last_read: list[Unsettled] = []
        self._counts: dict[int, tuple[torch.Tensor, int, int]] = {}

    def start(self, *, check: bool) -> None:
        """A new step begins."""
        self.forget()
        self.checking, self.checked = check, 0

    def forget(self) -> None:
        """The step is over, and so are its marks."""
        self.settle()
        self._marks.clear()
        self._counts.clear()
        self.any = False
        self._let_go()

    def prune(self) -> None:
        """Let go of marks whose buffers are gone."""
        self._marks = {key: m for key, m in self._marks.items() if not m[0].storage.expired()}
        self.any = bool(self._marks)

    # --- marks ---

    def add(
        self,
        tensor: torch.Tensor,
        rows: torch.Tensor,
        dim: int = 0,
        *,
        function: int | None = None,
        later: int = 0,
    ) -> bool:
        """Mark the tensor's rows; whether it has any that can be told apart in memory.

        `later`: by how much its version will have gone up when the operation that runs now is over. `function`:
        the mark is made where nothing makes nodes, and this is the number of the next one.
        """
        key = plain_storage(tensor)
        if key is None or not self.on or not tensor.is_floating_point() or not tensor.numel():
            return False
        row_bytes = tensor.stride(dim) * tensor.element_size()
        if not row_bytes or tensor.is_inference():
            return False
        storage = tensor.untyped_storage()
        first = int(tensor.storage_offset()) * tensor.element_size()
        for start in (first - first % row_bytes, first):
            mark = Mark(
                StorageWeakRef(storage), tensor._version + later, rows, rows._version,
                tensor.shape[dim], start, row_bytes, function,
            )  # fmt: skip
            if mark.dim_of(tensor) == dim and mark.last <= storage.nbytes():
                known = self._marks.setdefault(key, [])
                # The one made last is the one that holds.
                known[:] = [other for other in known if not (other.start == start and other.agrees(mark))]
                known.insert(0, mark)
                self.any = True
                return True
        return False

    def find(self, tensor: torch.Tensor) -> tuple[Mark, int] | None:
        """The mark of a floating tensor's rows, and the dimension they are in."""
        if not self._marks or not tensor.is_floating_point():
            return None
        key = plain_storage(tensor)
        known = None if key is None else self._marks.get(key)
        if not known or known[0].storage.expired() or tensor.is_inference():
            return None
        for mark in known:
            if mark.version == tensor._version and mark.rows_version == mark.rows._version:
                dim = mark.dim_of(tensor)
                if dim is not None:
                    return mark, dim
        return None

    # --- pack: a tensor is saved ---

    def saved(self, tensor: torch.Tensor, number: int | None) -> Valid | None:
        """The valid rows of a tensor that is saved before node `number` is made; None if it is saved whole."""
        found = self.find(tensor)
        if found is not None and number is not None:
            mark, dim = found
            function = mark.function == number
            if function:
                self.ignores_the_rest(tensor)
            if function or self.watched:
                return Valid(mark.rows, mark.capacity, mark.start, mark.last, dim, number, function)
        return None

    def wait(self, key: int, region: str, shape: torch.Size, number: int, whole: Callable[[], None]) -> None:
        """A tensor was saved as if its reader were row-wise; `whole` is called if it turns out not to be."""
        self._waiting.append(Unsettled(key, region, shape, whole, number))

    def settle(
        self,
        keys: set[int] = frozenset(),  # type: ignore[assignment]
        effect: Effect | None = None,
        number: int | None = None,
    ) -> None:
        """An operation with operands in the storages `keys` comes next: it, or the last one, saved what waits.

        `number`: of the node after the operation's own; None if it has none.
        """
        waiting, self._waiting = self._waiting, []
        read = []
        for item in waiting:
            if item.number == number and item.key in keys:
                if effect is not None and item.key in effect.safe and item.key not in effect.unsafe:
                    read.append(item)
                    continue
            elif item.number == self._last_number and item.key in self._last_keys:
                self._last_read.append(item)
                continue
            item.whole()
        if self.checking and self._last_read:
            self._check()
        self._let_go()
        self._last_read, self._last_number = read, number

    def ran(self, results: list[torch.Tensor], effect: Effect) -> None:
        """The row-wise operation ran: its results are marked."""
        for result in results:
            if self.add(result, effect.mark.rows, result.ndim + effect.dim):
                key = plain_storage(result)
                assert key is not None
                self._last_keys.add(key)
        if self.checking:
            # Until the next operation: autograd is still to make its node.
            self._last_effect, self._last_results = effect, results

    def changed(self, tensor: torch.Tensor, effect: Effect) -> None:
        """A row-wise operation wrote over its first operand; autograd is still to count the version up."""
        mark = effect.mark
        if self.add(tensor, mark.rows, tensor.ndim + effect.dim, later=1):
            key = plain_storage(tensor)
            assert key is not None
            self._last_keys.add(key)
        if self.checking:
            self._last_effect, self._last_results = effect, [tensor]

    def _let_go(self) -> None:
        self._last_effect, self._last_results, self._last_keys, self._last_read = None, [], set(), []

    # --- the check ---

    def ignores_the_rest(self, tensor: torch.Tensor) -> None:
        """Something reads valid rows of `tensor` alone, and may leave garbage in the gradient of the others."""
        if self.checking:
            expect_garbage(tensor)

    def _check(self) -> None:
        """Look, in backward, whether a gradient reaches rows that were dropped."""
        effect, read = self._last_effect, self._last_read
        if effect is None or not self._last_results or self._last_results[0].grad_fn is None:
            return
        self.checked += 1
        before, self.paused = self.paused, True
        last = effect.mark.capacity if effect.ends is None else int(effect.ends[-1])
        saved = ", ".join(str(tuple(item.shape)) for item in read)
        watch_gradient(
            self._last_results[0],
            effect.dim,
            self._count(effect.mark.rows),
            min(last, effect.mark.capacity),
            sums=effect.sums,
            saved=f"a tensor of shape {saved} in region {read[0].region!r}",
        )
        self.paused = before

    def _count(self, rows: torch.Tensor) -> int:
        known = self._counts.get(id(rows))
        if known is None or known[1] != rows._version:
            known = self._counts[id(rows)] = (rows, rows._version, max(0, int(rows)))
        return known[2]
