"""Regions: named parts of forward whose saved tensors share a rule; and the regions that are open now."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.policy import Policy, Rule
from pagestash.saved.compiled import hidden
from pagestash.saved.rows import operations
from pagestash.saved.rows.marks import Marks
from pagestash.saved.storage import Entry
from pagestash.torch_internals import StorageWeakRef, key_of_storage

T = TypeVar("T")


class RegionOwner(Protocol):
    """What a region belongs to: the hooks of one keeper, or a profile."""

    policy: Policy
    names: WeakKeyDictionary[nn.Module, str]
    """Modules that a rule names."""
    marks: Marks
    weights: set[int]
    """Storages of weights. A region has those of its own module in its `weights`."""

    def open(self, region: "Region") -> None:
        """A region was opened, in which tensors will be saved."""
        ...

    def close(self, region: "Region") -> None:
        """The region is over."""
        ...

    def check_stream(self, region: str) -> None:
        """Tensors of the region move, or its replay will ask for some that have; refuses a second stream."""
        ...

    def run_once(self, fn: Callable[[], T]) -> T:
        """Run what `ps.once` is given, where no region around is recomputed."""
        ...


class Forward:
    """A forward of a region under recompute: the recorded one, or a replay.

    (No `ABC`: `isinstance` of one takes 0.3 µs, and is asked for every saved tensor.)
    """

    replays = False

    def run_once(self, fn: Callable[[], Any]) -> Any:
        """The result of `fn`, which runs in the recorded forward only."""
        raise NotImplementedError

    def note(self, tensor: torch.Tensor) -> None:
        """An operation inside has saved `tensor`, whatever its home."""
        raise NotImplementedError


class Recording(Forward):
    """The first forward of a region under recompute, which says what is discarded."""

    def home_of(self, tensor: torch.Tensor, key: int | None) -> "Region | None":
        """The region whose home takes a tensor of storage `key` saved in this one; None: it is discarded."""
        raise NotImplementedError

    def discard(self, tensor: torch.Tensor, key: int | None, rows: torch.Tensor | None) -> Any:
        """What autograd holds in place of the tensor noted last, which a replay brings back."""
        raise NotImplementedError

    def leave_unchecked(self, tensor: torch.Tensor) -> None:
        """A replay may write other values where nobody reads them."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Region:
    """A region that is open: its name and rule, and the entries saved in it so far."""

    owner: RegionOwner
    name: str
    rule: Rule | None
    rows: torch.Tensor | None = None
    """The valid rows of each tensor that is claimed for this region, of `capacity`; None: all of them."""
    capacity: int = 0
    sized: bool = False
    """Whether `capacity` is not much more than usually arrives: codes of it are held as one buffer of that size."""
    weights: set[int] = field(default_factory=set)
    entries: list[Entry] = field(default_factory=list)
    claims: dict[int, tuple[StorageWeakRef, "Region"]] = field(default_factory=dict)
    """Storages whose bytes, when saved in here, belong to another region."""
    run: Forward | None = None
    """What discards the tensors saved in here, to recompute them; None where they have a home."""
    recorded: bool = True
    """Whether this region, or one around it, may have a `run`. `enter` knows."""
    whole_step: bool = False
    """The outermost region, open for the whole step. No tensor can be claimed in it."""
    looking: "operations.RowWise | None" = None
    """The dispatch mode that hands marks on from operation to operation."""
    modes: int = 0
    """How many dispatch modes were open when the region was opened."""

    def claim(self, tensor: torch.Tensor, owner: "Region") -> None:
        """What is saved of `tensor` in this region belongs to the region `owner`."""
        storage = tensor.untyped_storage()
        # While the weak reference lives, no other storage gets this key; and it tells when the storage is gone.
        self.claims[key_of_storage(storage)] = (StorageWeakRef(storage), owner)

    def claimed(self, key: int | None) -> "Region | None":
        """The region that a storage belongs to when it is saved in this one; None: this region."""
        found = None if key is None else self.claims.get(key)
        return None if found is None or found[0].expired() else found[1]


# The innermost last. They belong to the running step and thread, not to the process: a keeper that is not in a step
# has no frame here, and two keepers have their own.
_frames: ContextVar[tuple[Region, ...]] = ContextVar("pagestash_regions", default=())


frames = _frames.get
"""The open regions, the innermost last. (An alias, not a function: it is called for every saved tensor.)"""


def set_frames(value: tuple[Region, ...]) -> None:
    _frames.set(value)


def enter(region: Region) -> None:
    current = _frames.get()
    region.recorded = region.run is not None or (bool(current) and current[-1].recorded)
    _frames.set((*current, region))
    region.modes = operations.depth()
    if region.owner.marks.any and not region.whole_step:
        look_at_operations(region)


def look_at_operations(region: Region) -> None:
    """Hand marks on from operation to operation in `region`, the innermost, until it ends."""
    marks = region.owner.marks
    # If the caller has opened a mode inside the region, that may end first, and would pop ours.
    if not marks.watched and operations.depth() == region.modes:
        region.looking = operations.begin(marks)


def leave(region: Region) -> tuple[Region, ...]:
    """Leave `region` and all regions inside it. Returns those, the innermost first; empty if it is not open.

    There are regions inside if an exception ended them before anybody could leave them.
    """
    current = _frames.get()
    if current and current[-1] is region and region.looking is None:  # as almost always
        _frames.set(current[:-1])
        return (region,)
    if region not in current:
        return ()
    start = current.index(region)
    left = current[start:][::-1]
    for frame in left:
        if frame.looking is not None:
            operations.end(frame.looking)
            frame.looking = None
            frame.owner.marks.prune()
    _frames.set(current[:start])
    return left


def no_module(rule: Rule, name: str) -> str:
    """The error for a recompute rule on a region that is no module."""
    return (
        f"rule {rule.match!r}: home='recompute' needs a module, whose forward can be run again, but {name!r} is a "
        "region opened with ps.region(); make it a module, or give it another home"
    )


@hidden
def replaying() -> bool:
    """Whether a forward is replayed. What a module stashes by itself then would never be asked for."""
    if torch.compiler.is_compiling():
        return False
    current = _frames.get()
    return bool(current) and current[-1].run is not None and current[-1].run.replays


@hidden
def in_recompute() -> bool:
    """Whether a region under recompute is open, in its recorded forward or a replay."""
    if torch.compiler.is_compiling():
        return False
    return any(frame.run is not None for frame in _frames.get())


@contextmanager
@hidden
def region(name: str = "") -> Iterator[None]:
    """Name a part of forward that is not a module.

        with ps.region("experts"):
            h = grouped_mm(ps.rows(x, n), w1)

    The name is appended to the enclosing module's. If no rule matches it, the enclosing rule applies. Outside a
    keeper's step this does nothing.
    """
    # (torch.compile makes one graph of what is inside and outside.)
    current = () if torch.compiler.is_compiling() else _frames.get()
    if not current:
        yield
        return
    outer = current[-1]
    if replaying():
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
        weights=outer.weights,
        run=outer.run if own is None or own.home == "recompute" else None,
    )
    enter(inner)
    inner.owner.open(inner)
    try:
        yield
    finally:
        for left in leave(inner):
            left.owner.close(left)
