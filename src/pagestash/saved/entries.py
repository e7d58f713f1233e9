"""Which entry holds the bytes of a tensor that is being saved: one that is there already, or a new one.

A slice may be a small part of what it spans. Queries, keys and values of a fused projection are such slices, and
are all of it together: then one entry has all of them. Whether others follow is known when the region closes. If
all that was saved is a small part, it is copied, and the copy is held.
"""

from pagestash.policy import HomeName
from pagestash.saved.home import give_up
from pagestash.saved.region import Region
from pagestash.saved.rows.marks import Valid
from pagestash.saved.storage import SPARSE, Entry, SavedView, ViewRecipe
from pagestash.torch_internals import StorageWeakRef


class Entries:
    """The entries of one keeper, by storage and home."""

    def __init__(self) -> None:
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
        # (An expanded view is as small as what it repeats.)
        thin = valid is None and last - first > SPARSE * tensor.nbytes
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
                inside = rows is None and entry in region.entries
                if entry.same_content(version, rows, capacity, first, last) and entry.handles:
                    pass
                elif inside and entry.covers(version, first, last):
                    entry.take_all()
                elif not (inside and entry.widen(version, first, last, tensor.nbytes)):
                    continue
                if entry.views is not None:
                    entry.views[recipe] = tensor.detach()
                return entry
        storage = tensor.untyped_storage()
        alone = tensor.detach()
        # (By position: names take half a microsecond.)
        entry = Entry(
            StorageWeakRef(storage), version, first, last, alone, rows, rows_version, capacity,
            region.name, rule, storage.nbytes(), 0, 0, False, None, dtype, region.rows is None, region.sized, form,
            {recipe: alone} if thin else None,
        )  # fmt: skip
        known.append(entry)
        region.entries.append(entry)
        self._of_step.append(entry)
        return entry

    def give_up(self) -> None:
        """The step ended by an exception: no backward will ask for what it saved."""
        give_up(self._of_step)
        lost = set(self._of_step)
        self._known = {key: [e for e in all_ if e not in lost] for key, all_ in self._known.items()}

    def forget(self) -> None:
        """The step is over. Drop the identities of entries that nothing holds any more."""
        self._of_step = []
        alive = {key: [e for e in entries if e.handles] for key, entries in self._known.items()}
        self._known = {key: entries for key, entries in alive.items() if entries}
