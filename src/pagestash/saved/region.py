"""Regions: named stretches of forward whose saved tensors share a rule, and which of them we are in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pagestash.policy import Policy, Rule
from pagestash.saved.compiled import hidden
from pagestash.saved.storage import Entry
from pagestash.saved.valid_rows import rowwise
from pagestash.saved.valid_rows.marks import Marks
from pagestash.saved.valid_rows.old_form import OldForm


class RegionOwner(Protocol):
    """What a region belongs to: the hooks of one keeper, or a profile."""

    policy: Policy
    names: WeakKeyDictionary[nn.Module, str]
    """Watched modules: those that a rule names."""
    marks: Marks
    weights: set[int]
    """Storages of weights; those of a region's own module are in the region."""

    def open(self, region: "Region") -> None:
        """A region that is no module was entered."""
        ...

    def close(self, region: "Region") -> None:
        """The region is over."""
        ...


class Forward(ABC):
    """A forward of a region under recompute: the recorded one, or a replay."""

    replays = False

    @abstractmethod
    def run_once(self, fn: Callable[[], Any]) -> Any:
        """The result of `fn`, which runs in the recorded forward only."""

    @abstractmethod
    def note(self, tensor: torch.Tensor) -> None:
        """An operation inside has saved `tensor`, whatever its home."""


class Recording(Forward):
    """The first forward of a region under recompute, which says what is discarded."""

    @abstractmethod
    def home_of(self, tensor: torch.Tensor) -> "Region | None":
        """The region whose home takes a tensor that is saved in this one; None if it is discarded."""

    @abstractmethod
    def discard(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> Any:
        """What autograd holds in place of the tensor noted last, which a replay brings back."""


@dataclass(slots=True, eq=False)
class Region:
    """One entry into a region: its name and rule, its valid rows, and the entries saved in it so far."""

    owner: RegionOwner
    name: str
    rule: Rule | None
    rows: torch.Tensor | None = None
    capacity: int = 0
    exact: bool = False
    """`rows` are those of tensors that were claimed one by one; else those of a `ps.region(rows=...)` around it."""
    weights: set[int] = field(default_factory=set)
    entries: list[Entry] = field(default_factory=list)
    claims: dict[int, tuple[StorageWeakRef, "Region"]] = field(default_factory=dict)
    """Storages whose bytes, when saved in here, belong to another region."""
    run: Forward | None = None
    """What discards the tensors saved in here, to recompute them; None where they have a home."""
    whole_step: bool = False
    """The region that a step is in where it is in no other. It ends with the step, so it can claim nothing."""
    looking: "rowwise.RowWise | None" = None
    """Hands marks on from operation to operation, while the region is open."""
    modes: int = 0
    """Dispatch modes that were open when the region began."""

    def claim(self, tensor: torch.Tensor, owner: "Region") -> None:
        """What is saved of `tensor` in here belongs to `owner`."""
        storage = tensor.untyped_storage()
        # The weak reference keeps the storage's key from being given to another, and tells when it is gone.
        self.claims[storage._cdata] = (StorageWeakRef(storage), owner)

    def claimed(self, key: int | None) -> "Region | None":
        """Whose the bytes of a storage are when saved in here; None: this region's."""
        found = None if key is None else self.claims.get(key)
        return None if found is None or found[0].expired() else found[1]


# The innermost last. Scoped to the running step and thread, not to the process: a keeper that is not in a step
# has no frame here, and two keepers have frames of their own.
_frames: ContextVar[tuple[Region, ...]] = ContextVar("pagestash_regions", default=())


frames = _frames.get
"""The regions we are in. (No function of our own around it: every saved tensor asks.)"""


def set_frames(value: tuple[Region, ...]) -> None:
    _frames.set(value)


def enter(region: Region) -> None:
    _frames.set((*_frames.get(), region))
    region.modes = rowwise.depth()
    if region.owner.marks.any and not region.whole_step:
        look_at_operations(region)


def look_at_operations(region: Region) -> None:
    """Hand marks on in `region`, the innermost, from here to its end."""
    marks = region.owner.marks
    # A mode that the caller opened in the meantime may end before the region, and would take ours for its own.
    if not marks.watched and rowwise.depth() == region.modes:
        region.looking = rowwise.begin(marks, region.owner.weights | region.weights)


def leave(region: Region) -> tuple[Region, ...]:
    """Go back to where `region` was entered; what that leaves, the innermost first, and nothing if it is not open.

    More than itself where an exception has ended regions inside that nobody left.
    """
    current = _frames.get()
    if region not in current:
        return ()
    start = current.index(region)
    left = current[start:][::-1]
    for frame in left:
        if frame.looking is not None:
            rowwise.end(frame.looking)
            frame.looking = None
            frame.owner.marks.prune()
    _frames.set(current[:start])
    return left


def no_module(rule: Rule, name: str) -> str:
    """Why a rule of recompute cannot hold for a region that is no module."""
    return (
        f"rule {rule.match!r}: home='recompute' needs a module, whose forward can be run again, and {name!r} is a "
        "region opened with ps.region(); make it a module, or give it another home"
    )


@hidden
def running_again() -> bool:
    """Whether a region is run again: what a module puts away by itself then, nobody would ever ask for."""
    if torch.compiler.is_compiling():
        return False
    current = _frames.get()
    return bool(current) and current[-1].run is not None and current[-1].run.replays


@hidden
def in_recompute() -> bool:
    """Whether we are inside a region under recompute, in its first forward or a later one."""
    if torch.compiler.is_compiling():
        return False
    return any(frame.run is not None for frame in _frames.get())


@contextmanager
@hidden
def region(
    name: str = "", *, rows: torch.Tensor | None = None, capacity: int | None = None
) -> Iterator[None]:
    """Name a stretch of forward that is no module.

        with ps.region("experts"):
            h = grouped_mm(ps.rows(x, n), w1)

    The name is appended to the enclosing module's; without a matching rule the enclosing rule holds. Outside a
    keeper's step this does nothing.

    `rows` and `capacity` are the old form of `ps.rows`, which says what it means: every floating buffer of
    `capacity` rows that comes in from outside is marked. `rows` must keep its value until the region ends.
    """
    if (rows is None) != (capacity is None):
        raise ValueError(f"rows={rows}, capacity={capacity}: give both or neither")
    if isinstance(rows, int):
        raise ValueError(f"rows={rows}: expected an integer tensor on the device, of one element")
    # (A compiler makes one graph of what is inside and what is not.)
    current = () if torch.compiler.is_compiling() else _frames.get()
    if not current:
        yield
        return
    outer = current[-1]
    if running_again():
        yield
        return
    full = f"{outer.name}.{name}" if outer.name and name else outer.name or name
    own = outer.owner.policy.rule_for(full) if name else None
    if own is not None and own.home == "recompute" and outer.run is None:
        raise ValueError(no_module(own, full))
    inner = Region(
        outer.owner,
        full,
        own or outer.rule,
        rows=outer.rows if rows is None else rows,
        capacity=outer.capacity if capacity is None else capacity,
        weights=outer.weights,
        run=outer.run if own is None or own.home == "recompute" else None,
    )
    marks = inner.owner.marks
    old_form = None
    if rows is not None and capacity is not None and marks.on:
        old_form = OldForm(full, rows, capacity)
        marks.old_forms.append(old_form)
    enter(inner)
    inner.owner.open(inner)
    try:
        yield
    finally:
        for left in leave(inner):
            left.owner.close(left)
        if old_form is not None and old_form in marks.old_forms:
            marks.end_old_form()
