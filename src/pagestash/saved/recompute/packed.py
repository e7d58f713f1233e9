"""What autograd holds in place of a tensor that is recomputed."""

from dataclasses import dataclass, field

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.packed import Handle, Packed
from pagestash.saved.recompute.recomputed import Recomputed
from pagestash.saved.recompute.value_checks import summary_of
from pagestash.saved.storage import Entry, ViewRecipe
from pagestash.torch_internals import StorageWeakRef


@dataclass(slots=True, eq=False)
class Discarded(Packed):
    """A tensor that a region under recompute saved and let go of: the number under which it saved it."""

    recomputed: Recomputed
    number: int

    moved = True

    @hidden
    def __del__(self) -> None:
        self.recomputed.forget(self.number)

    def changed(self) -> bool:
        return False  # a replay makes it as it was, and looks itself whether it is changed afterwards

    def unpack(self) -> torch.Tensor:
        return self.recomputed.take(self.number)


@dataclass(slots=True, eq=False)
class OutputHandle(Handle):
    """A saved tensor that is an output of a recomputed region: its entry's place is an `Output`."""

    recomputed: Recomputed = field(kw_only=True)
    summary: torch.Tensor | None = None
    """Of its values, until they were compared."""

    @property
    def recomputed_by(self) -> str:  # type: ignore[override]
        return self.recomputed.recipe.name

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        tensor = Handle.view(self, flat)
        summary, self.summary = self.summary, None
        if summary is not None:
            self.recomputed.recipe.compare(
                summary,
                tensor,
                f"the output of region {self.recomputed_by!r}, which is under recompute, had other values when it "
                "was recomputed for the operation that saved it: either forward is not deterministic, or a kernel "
                "changed the output in place without telling autograd. A rule of 'keep' for the region that saved "
                "it holds it instead",
            )
        return tensor


@dataclass(slots=True, eq=False)
class Output:
    """An output of a recorded forward; the place of the entry that stands for it."""

    recomputed: Recomputed
    number: int

    @property
    def moves(self) -> bool:
        return self.recomputed.moves

    def pack(self, tensor: torch.Tensor, recipe: ViewRecipe, *, whole: bool) -> OutputHandle:
        """A handle of `tensor`, a view of the output; `whole` if no row of it may be garbage."""
        recomputed = self.recomputed
        entry = recomputed.entries.get(self.number)
        if entry is None:
            storage = tensor.untyped_storage()
            entry = Entry(
                storage=StorageWeakRef(storage),
                version=tensor._version,
                first=0,
                last=storage.nbytes(),
                origin=None,
                place=self,
                region=recomputed.recipe.name,
            )
            recomputed.want_output(self.number, entry)
        entry.handles += 1
        entry.waiting += 1
        summary = summary_of(tensor) if whole and recomputed.recipe.checked else None
        return OutputHandle(entry, recipe, recomputed=recomputed, summary=summary)

    def get(self, entry: Entry) -> torch.Tensor:
        tensor = self.recomputed.take_output(self.number, last=not entry.waiting)
        if tensor.nbytes == entry.last and tensor.is_contiguous():
            return tensor  # all of its storage, which is the entry
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), entry.first, (entry.length,), (1,))

    def drop(self, entry: Entry) -> None:
        self.recomputed.forget_output(self.number)
        entry.place = (
            None  # the home lists the step's entries to its end, and must not hold a region's inputs
        )
