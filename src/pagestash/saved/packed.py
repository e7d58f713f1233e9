"""What autograd holds in place of a saved tensor."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.homes import Held
from pagestash.saved.identity import Entry, ViewRecipe
from pagestash.saved.region import Region
from pagestash.saved.rowwise import NODES


class Look(Protocol):
    """Somebody who is told what became of every tensor that is saved."""

    def saw(self, region: Region, tensor: torch.Tensor, packed: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Handle:
    """What autograd holds in place of a saved tensor. Its death is the sign that backward is done with it."""

    entry: Entry
    recipe: ViewRecipe
    dense: bool  # the entry's bytes are this view's elements in order, to be laid out with its strides again
    mark: torch.Tensor | None = None  # of its values, where what is made again is checked
    asked: bool = False
    inferred: bool = False  # nobody said that its reader is row-wise; it was seen to be

    @hidden
    def __del__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """It asks for the entry no more."""
        entry = self.entry
        entry.handles -= 1
        if not self.asked:
            entry.waiting -= 1
        if entry.handles == 0 and entry.place is not None:
            entry.home.drop(entry)


@dataclass(slots=True, eq=False)
class Kept:
    """An activation that stays where it is: most are, so this is all there is to it."""

    tensor: torch.Tensor
    version: int
    region: str
    held: Held

    @hidden
    def __del__(self) -> None:
        self.held.let_go()


@dataclass(slots=True, eq=False)
class Untouched:
    """A weight, or what has no plain memory: kept as it is. Autograd checks no versions under hooks; we do."""

    tensor: torch.Tensor
    version: int


def check_reader(packed: Handle) -> None:
    """A tensor that was cut because a row-wise operation took it in next may have been saved by something else."""
    node = torch._C._current_autograd_node()
    if node is not None and node.name() not in NODES:
        raise RuntimeError(
            f"{node.name()} saved a tensor of shape {tuple(packed.recipe.size)} in region {packed.entry.region!r} "
            "that ps.rows marks, and is not known to read row by row; rows past the valid ones were dropped. "
            "Do not mark the buffer, or compute what is saved there from one that is not marked"
        )


def changed_in_place(shape: torch.Size, what: str, region: str) -> RuntimeError:
    where = f" in region {region!r}" if region else ""
    return RuntimeError(
        f"{what} of shape {tuple(shape)} saved for backward{where} was changed in place afterwards, which would be "
        "refused without a keeper, too; clone it before changing it"
    )
