"""What autograd holds in place of a saved tensor: one class for each thing that can become of it."""

from dataclasses import dataclass
from typing import Protocol

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.home import KeptStorage
from pagestash.saved.region import Region
from pagestash.saved.rows.operations import NODES
from pagestash.saved.storage import Entry, ViewRecipe
from pagestash.torch_internals import current_node, sequence_number


class Packed:
    """Stands for a saved tensor in the graph. Autograd checks no versions under hooks, so `unpack` does."""

    __slots__ = ()

    moved = False
    """Whether its bytes leave their storage, or are recomputed."""
    recomputed_by = ""
    """The region whose output it is, where that is recomputed."""

    def changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        raise NotImplementedError

    def unpack(self) -> torch.Tensor:
        """The tensor as it was saved."""
        raise NotImplementedError


@hidden
def unpack(packed: Packed) -> torch.Tensor:
    """The unpack hook: backward asks for a saved tensor."""
    return packed.unpack()


class Look(Protocol):
    """Somebody who is told what became of every tensor that is saved."""

    def saw(self, region: Region, tensor: torch.Tensor, packed: Packed) -> None: ...

    def discarded_by(self, region: str) -> None: ...


@dataclass(slots=True, eq=False)
class Untouched(Packed):
    """A weight, or a tensor without plain memory: it stays as it is."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Untouched":
        """Detached: with its graph, an operation's own output would keep that operation alive for ever."""
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def changed(self) -> bool:
        return self.tensor._version != self.version

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.shape, "a weight or buffer", "")
        return self.tensor


@dataclass(slots=True, eq=False)
class Kept(Packed):
    """An activation that stays where it is. Most do, so this is as small as it can be."""

    tensor: torch.Tensor
    version: int
    region: str
    held: KeptStorage

    @hidden
    def __del__(self) -> None:  # `let_go`, without a call
        held = self.held
        held.holders -= 1
        if not held.holders:
            held.keep.forget(held)

    def changed(self) -> bool:
        return self.tensor._version != self.version

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.shape, "a tensor", self.region)
        return self.tensor


@dataclass(slots=True, eq=False)
class Handle(Packed):
    """A view of an entry. When the last handle of an entry dies, backward is done with the entry."""

    entry: Entry
    recipe: ViewRecipe
    asked: bool = False
    checks: bool = False
    """A mark cut rows off: what reads it must be what was seen to save it."""
    function: int | None = None
    """The number after that of the custom function which marked it."""

    moved = True

    @hidden
    def __del__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """It asks for the entry no more."""
        if not self.asked:
            self.entry.waiting -= 1
        self.entry.let_go()

    def changed(self) -> bool:
        entry = self.entry
        if entry.origin is not None and not entry.spoiled:
            entry.spoiled = entry.origin._version != entry.version
        return entry.spoiled

    def unpack(self) -> torch.Tensor:
        entry = self.entry
        if self.changed():
            raise changed_in_place(self.recipe.size, "a tensor, or its row count,", entry.region)
        if self.checks and entry.rows is not None:
            self._check_reader()
        if entry.place is None:
            # Its region is not over: forward takes gradients inside, or an interrupt ended it.
            flat = entry.here()
        else:
            if not self.asked:
                self.asked = True
                entry.waiting -= 1
            flat = entry.place.get(entry)
        if entry.spoiled:  # a copy was under way, and only the home knew when it ended
            raise changed_in_place(self.recipe.size, "a tensor, or its row count,", entry.region)
        return self.view(flat)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The saved tensor, in the entry's bytes."""
        slices = self.entry.slices
        if slices is None:
            return self.recipe.apply(flat, self.entry.first)
        return self.recipe.spread(flat[slices[self.recipe] :])

    def _check_reader(self) -> None:
        """It was cut because a row-wise operation took it in next, or by a custom function's own mark; something
        else may have saved it, such as a function that applied this one."""
        node = current_node()
        if node is None:
            return
        known = node.name() in NODES if self.function is None else sequence_number(node) + 1 == self.function
        if not known:
            raise RuntimeError(
                f"{node.name()} saved a tensor of shape {tuple(self.recipe.size)} in region "
                f"{self.entry.region!r} that ps.rows marks, and is not known to read row by row; rows past the "
                "valid ones were dropped. Do not mark the buffer, or compute what is saved there from one that is "
                "not marked. (A custom function that marks what it saves applies no other)"
            )


def changed_in_place(shape: torch.Size, what: str, region: str) -> RuntimeError:
    where = f" in region {region!r}" if region else ""
    return RuntimeError(
        f"{what} of shape {tuple(shape)} saved for backward{where} was changed in place afterwards, which would be "
        "refused without a keeper, too; clone it before changing it"
    )
