"""Which entry holds the bytes of a tensor that is being saved: one that is there already, or a new one.

A thin slice of what it spans is copied, and the copy is held. Queries, keys and values of a fused projection are
thin slices which together are all of it: then one entry has all of them, and nothing is copied. Whether others
follow is not known when the first is saved, but it was in the step before.
"""

from dataclasses import dataclass, field

import torch

from pagestash.policy import HomeName
from pagestash.saved.lost import give_up
from pagestash.saved.region import Region
from pagestash.saved.storage import SPARSE, Entry, SavedView, ViewRecipe
from pagestash.saved.valid_rows.mark import Valid
from pagestash.torch_internals import StorageWeakRef

_MOST_FOLLOWED = 4096

First = tuple[str, torch.dtype, int, int]
"""A first slice: its region, dtype, number of dimensions and first byte in the storage. (Its sizes may vary.)"""


@dataclass(slots=True, eq=False)
class _Copied:
    """Thin slices of one storage that a region has saved, one after the other, and that were copied."""

    region: Region
    key: int
    version: int
    which: First
    first: int
    last: int
    sizes: dict[ViewRecipe, int] = field(default_factory=dict)


class Entries:
    """The entries of one keeper, by storage and home."""

    def __init__(self) -> None:
        self._followed: dict[First, bool] = {}
        """First slices that others followed, so that all are one entry; and whether others did the last time."""
        self._first: tuple[int, First] | None = None
        """The first slice that was saved last without a copy, and the key of its storage, until another follows."""
        self._copied: _Copied | None = None
        self._known: dict[tuple[int, HomeName], list[Entry]] = {}
        self._of_step: list[Entry] = []

    def find(
        self, view: SavedView, recipe: ViewRecipe, region: Region, valid: Valid | None, coded: bool = False
    ) -> Entry:
        """The entry that holds the bytes of `view`, or a new one in the region's group.

        `recipe` is the view's. If the tensor may be `coded` in eight bits, so is the new one.
        """
        tensor, key, version, first, last = view
        rule = region.rule
        assert rule is not None
        which = (key, rule.home)
        dtype = tensor.dtype if coded else None
        rows, rows_version, capacity = None, 0, 0
        form: ViewRecipe | None = None
        if valid is not None:
            rows, capacity, first, last = valid[:4]
            rows_version = rows._version
        elif not coded:
            if first % 16:  # every dtype's view starts on an element, and copies are wide
                first -= first % 16
            elif tensor.nbytes == last - first:
                form = recipe
        known = self._known.get(which)
        if known is None:
            known = self._known[which] = []
        else:
            # The weak reference keeps the storage's identity from being given to another tensor; an entry whose
            # storage is gone can no longer be the one that is being saved.
            known[:] = [entry for entry in known if entry.handles and not entry.storage.expired()]
            for entry in known:
                if entry.dtype is not None and entry.dtype is not dtype:
                    continue  # codes, and exact bytes are asked for, or those of another dtype
                if entry.same_content(version, rows, capacity, first, last) and entry.handles:
                    return entry
                if rows is None and entry in region.entries and entry.covers(version, first, last):
                    entry.take_all()
                    return entry
                if rows is None and entry in region.entries and entry.widen(version, first, last):
                    return entry
        storage = tensor.untyped_storage()
        # (By position: names take half a microsecond.)
        entry = Entry(
            StorageWeakRef(storage), version, first, last, tensor.detach(), rows, rows_version, capacity,
            last - first, region.name, rule, storage.nbytes(), 0, 0, False, None, dtype, form,
        )  # fmt: skip
        known.append(entry)
        region.entries.append(entry)
        self._of_step.append(entry)
        return entry

    def takes_in(self, view: SavedView, region: Region, size: int) -> bool:
        """Whether a thin slice of `size` bytes need not be copied.

        An entry of the region's group can have it for fewer bytes than its own; or it is the first of slices that
        together are most of what they span.
        """
        assert region.rule is not None
        which = (region.name, view.tensor.dtype, view.tensor.ndim, view.first)
        for entry in self._known.get((view.key, region.rule.home), ()):
            if (
                entry.handles
                and entry in region.entries
                and entry.version == view.version
                and entry.rows is None
                and entry.dtype is None
                and not entry.storage.expired()
            ):
                grown = max(entry.last, view.last) - min(entry.first, view.first)
                if grown - (entry.last - entry.first) < size:
                    if self._first is not None and self._first[0] == view.key and self._first[1] != which:
                        self._followed[self._first[1]] = True
                        self._first = None
                    return True
        if which not in self._followed:
            return False
        if not self._followed[which]:  # it was alone
            del self._followed[which]
            return False
        self._followed[which], self._first = False, (view.key, which)
        return True

    def copies(self, view: SavedView, region: Region) -> None:
        """A thin slice is copied. With those before it, it may be most of what they span."""
        tensor, key, version, first, last = view
        copied = self._copied
        if copied is None or (copied.region, copied.key, copied.version) != (region, key, version):
            which = (region.name, tensor.dtype, tensor.ndim, first)
            copied = self._copied = _Copied(region, key, version, which, first, last)
        copied.sizes[view.recipe()] = tensor.nbytes
        copied.first, copied.last = min(copied.first, first), max(copied.last, last)
        if copied.last - copied.first <= SPARSE * sum(copied.sizes.values()) and len(copied.sizes) > 1:
            if len(self._followed) >= _MOST_FOLLOWED:
                self._followed.clear()
            self._followed[copied.which] = True

    def give_up(self) -> None:
        """The step ended by an exception: no backward will ask for what it saved."""
        give_up(self._of_step)
        lost = set(self._of_step)
        self._known = {key: [e for e in all_ if e not in lost] for key, all_ in self._known.items()}

    def forget(self) -> None:
        """The step is over. Drop the identities of entries that nothing holds any more."""
        self._of_step = []
        self._first = self._copied = None
        alive = {key: [e for e in entries if e.handles] for key, entries in self._known.items()}
        self._known = {key: entries for key, entries in alive.items() if entries}
