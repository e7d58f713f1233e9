"""Marks: which buffers have valid rows, and which saved tensors may therefore be cut to them.

A mark says of a buffer that its first `rows` rows are valid, and that no gradient reaches the others. It belongs
to a storage at one version, never to a tensor object. What is computed from it row by row is marked, too
(`rowwise.py` has the table); everything else is not.

A saved tensor is cut only on evidence that its reader is row-wise as well. Autograd saves an operation's inputs
just before that operation is dispatched and its results just after, so a saved tensor first *waits*: the next
operation, if it takes the tensor in, or the last one, if the tensor is its result, settles it. No other node may be
made in between, which the number of the next one tells. A custom function makes its node before its forward runs,
and saves after it: so it is not taken for an operation of its forward, or for the next one.
"""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from pagestash.saved.storage import plain_storage, row_range
from pagestash.saved.valid_rows.gradient_check import expect_garbage, watch_gradient
from pagestash.saved.valid_rows.mark import Effect, Mark, Valid, Waiting
from pagestash.saved.valid_rows.old_form import OldForm
from pagestash.torch_internals import StorageWeakRef


class Marks:
    """The marks of one keeper's step."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self.any = False
        """Whether there is anything to look for: a mark, or an old form. (Asked for every saved tensor.)"""
        self.old_forms: list[OldForm] = []
        self.paused = False
        """The operations that run now are not the model's."""
        self.watched = 0
        """How many of the regions that we are in have `rowwise.py` look at their operations."""
        self.checking = False
        self.checked = 0
        self._marks: dict[int, list[Mark]] = {}
        self._waiting: list[Waiting] = []
        self._last_effect: Effect | None = None
        self._last_results: list[torch.Tensor] = []
        self._last_keys: set[int] = set()
        self._last_number: int | None = None
        self._last_read: list[Waiting] = []
        self._counts: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._warned: set[str] = set()

    def start(self, *, check: bool) -> None:
        """A new step begins."""
        self.forget()
        self.checking, self.checked = check, 0

    def forget(self) -> None:
        """The step is over, and so are its marks."""
        self.settle()
        self._marks.clear()
        self._counts.clear()
        self.old_forms.clear()
        self.any = False
        self._let_go()

    def prune(self) -> None:
        """Let go of marks whose buffers are gone."""
        self._marks = {key: m for key, m in self._marks.items() if not m[0].storage.expired()}
        self.any = bool(self._marks or self.old_forms)

    # --- marks ---

    def add(
        self,
        tensor: torch.Tensor,
        rows: torch.Tensor,
        dim: int = 0,
        *,
        function: int | None = None,
        within: "OldForm | None" = None,
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
                tensor.shape[dim], start, row_bytes, function, within,
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

    def saved(
        self, tensor: torch.Tensor, key: int, weights: set[int], number: int | None, region: str
    ) -> Valid | None:
        """The valid rows of a tensor that is saved before node `number` is made; None if it is saved whole."""
        if self.old_forms:
            self.come_in(tensor, key, weights)
        found = self.find(tensor)
        if found is not None and number is not None:
            mark, dim = found
            function = mark.function == number
            if function:
                self.ignores_the_rest(tensor)
            if function or self.watched:
                return Valid(mark.rows, mark.capacity, mark.start, mark.last, dim, number, function)
        if self.old_forms:
            self._warn_of(tensor, key, weights, region)
        return None

    def wait(self, key: int, region: str, shape: torch.Size, number: int, whole: Callable[[], None]) -> None:
        """A tensor was saved as if its reader were row-wise; `whole` is called if it turns out not to be."""
        self._waiting.append(Waiting(key, region, shape, whole, number))

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
                if (
                    effect is None or item.key not in effect.unsafe
                ):  # the right side of a product is no row buffer
                    self._warn(item.region, item.shape)
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
            if self.add(result, effect.mark.rows, result.ndim + effect.dim, within=effect.mark.within):
                key = plain_storage(result)
                assert key is not None
                self._last_keys.add(key)
        if self.checking:
            # Until the next operation: autograd is still to make its node.
            self._last_effect, self._last_results = effect, results

    def changed(self, tensor: torch.Tensor, effect: Effect) -> None:
        """A row-wise operation wrote over its first operand; autograd is still to count the version up."""
        mark = effect.mark
        if self.add(tensor, mark.rows, tensor.ndim + effect.dim, within=mark.within, later=1):
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

    # --- the old form ---

    def come_in(self, tensor: torch.Tensor, key: int, weights: set[int]) -> None:
        """Mark a buffer that comes into a region of the old form from outside, if it has as many rows."""
        inner = self.old_forms[-1]
        if not inner.may_come_in(tensor, key, weights):
            return
        found = self.find(tensor)
        if found is not None and found[0].rows is inner.rows and found[0].capacity == inner.capacity:
            return
        if row_range(tensor, inner.capacity) is not None:
            outer = max(range(tensor.ndim), key=lambda at: (tensor.stride(at), tensor.size(at)))
            self.add(tensor, inner.rows, outer, within=inner)

    def begin_old_form(self, region: OldForm) -> None:
        """A region of the old form begins."""
        self.old_forms.append(region)
        self.any = True

    def end_old_form(self) -> None:
        """The innermost region of the old form is over: outside, nothing was said of its buffers."""
        self.settle()
        inner = self.old_forms.pop()
        left = {key: [m for m in marks if m.within is not inner] for key, marks in self._marks.items()}
        self._marks = {key: marks for key, marks in left.items() if marks}
        self.any = bool(self._marks or self.old_forms)

    def _warn_of(self, tensor: torch.Tensor, key: int, weights: set[int], region: str) -> None:
        inner = self.old_forms[-1]
        weight = inner.is_weight(key, weights) or isinstance(tensor, nn.Parameter)
        if tensor.is_floating_point() and not weight and row_range(tensor, inner.capacity) is not None:
            self._warn(region, tensor.shape)

    def _warn(self, region: str, shape: torch.Size) -> None:
        if self.old_forms and region not in self._warned:
            self._warned.add(region)
            warnings.warn(
                f"ps.region(rows=, capacity=) in region {region!r}: a tensor of shape {tuple(shape)} has as many "
                "rows as the capacity, but nothing shows that only its first rows are valid, so it is kept whole. "
                "Mark the buffer itself with ps.rows(x, n)",
                stacklevel=2,
            )
