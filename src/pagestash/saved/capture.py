"""The one hook that sees every saved tensor: pack asks for a home, unpack gives the value back."""

import sys
from collections.abc import Mapping
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pagestash.policy import HomeName, Policy, Rule
from pagestash.saved.compiled import hidden
from pagestash.saved.homes import Home, Keep
from pagestash.saved.identity import (
    Entry,
    ViewRecipe,
    byte_range,
    is_sparse,
    plain_storage,
    row_range,
    transformed,
)
from pagestash.saved.lost import give_up
from pagestash.saved.marks import Marks, Valid
from pagestash.saved.packed import Handle, Kept, Look, Untouched, changed_in_place, check_reader
from pagestash.saved.recompute import Recompute
from pagestash.saved.region import Region, frames
from pagestash.saved.run import Run, Slot
from pagestash.saved.values import When, mark_of

Packed = Untouched | Kept | Handle | Slot


class Capture:
    """Packs and unpacks for one keeper: storage identity, versions, and which entry a region's tensor is."""

    def __init__(self, policy: Policy, homes: Mapping[HomeName, Home], device: torch.device | None) -> None:
        self.policy = policy
        self.homes = homes
        self.device = device
        self.weights: set[int] = set()
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.marks = Marks()
        keep = homes["keep"]
        assert isinstance(keep, Keep)
        self._keep = keep
        recompute = homes.get("recompute")
        self._recompute = recompute if isinstance(recompute, Recompute) else Recompute()
        self._entries: dict[tuple[int, HomeName], list[Entry]] = {}
        self._of_step: list[Entry] = []
        self.look: Look | None = None
        """Sees what becomes of every tensor, in the first steps."""

    @property
    def device_here(self) -> torch.device:
        assert self.device is not None, "no model is attached"
        return self.device

    # --- pack: forward saves a tensor ---

    @hidden
    def pack(self, tensor: torch.Tensor) -> Packed:
        """A handle for an activation; weights and what has no plain memory stay as they are."""
        region = owner = run = None
        for frame in reversed(frames()):
            if region is None and isinstance(frame.capture, Capture):
                # Of another keeper, perhaps, whose step is open around this one's: torch asks the inner one only.
                region, owner = frame, frame.capture
            if frame.run is not None and frame.run is not run:
                # Every forward that will be run again counts it: one may lie in a region of another home,
                # which lies in one that is run again itself.
                run = frame.run
                run.note(tensor)
        if region is None or owner is None or transformed() is not None:
            return Untouched(tensor, tensor._version)
        packed = owner.pack_in(region, tensor, caller=sys._getframe(1) if owner.marks.any else None)
        if owner.look is not None:
            owner.look.saw(region, tensor, packed)
        return packed

    def pack_in(
        self, region: Region, tensor: torch.Tensor, *, chained: bool = False, caller: FrameType | None = None
    ) -> Packed:
        """What stands for a tensor that is saved in `region`.

        `chained`: it is saved to run another region again. `caller` is whose operation saves it, where there are
        marks; what no operation saves is saved whole.
        """
        key = plain_storage(tensor)
        owner = region.claimed(key) or region if region.claims else region
        run = owner.run
        if isinstance(run, Run) and not self._is_weight(tensor, region):
            outer = run.home_of(tensor)
            if outer is None:
                return run.drop(tensor, self.rows_of(owner, tensor))
            region, owner, chained = outer, outer.claimed(key) or outer, True
        version = tensor._version
        if key is None or key in self.weights or key in region.weights:
            return Untouched(tensor, version)
        if owner.rule is None or owner.rule.home != "keep":
            handle = self._handle(owner, key, tensor, version, chained, caller)
            if handle is not None:
                return handle
        # Detached: with its graph, an operation's own output would keep that operation alive.
        alone = tensor.detach()
        return Kept(alone, version, owner.name, self._keep.hold(key, alone, version, owner.name))

    def _is_weight(self, tensor: torch.Tensor, region: Region) -> bool:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.layout != torch.strided:
            return False
        key = local.untyped_storage()._cdata
        return key in self.weights or key in region.weights

    def _handle(
        self,
        region: Region,
        key: int,
        tensor: torch.Tensor,
        version: int,
        chained: bool,
        caller: FrameType | None,
    ) -> Handle | None:
        """A handle of what moves, or is made again; None for what stays."""
        # What another region keeps alive anyway is worth neither a copy nor a forward.
        if self._keep.holds(key, version):
            return None
        home: HomeName = "keep"
        if region.rule is not None and self._worth_moving(tensor, region.rule):
            home = region.rule.home
        # The output of a recomputed region needs no home, unless a rule says to keep it.
        maker = self._recompute.maker(key, tensor, chained=chained)
        if home == "keep" and maker is None:
            return None
        # There are no bytes to move, or they are not the tensor's values as they stand.
        if not tensor.numel() or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        dense = maker is None and is_sparse(tensor)
        recipe = ViewRecipe(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.element_size()
        )
        at = key
        valid = None if maker is not None else self._valid(region, key, tensor, caller)
        if dense:
            # A copy of its own: no other saved tensor has the same bytes in the same order.
            before, self.marks.paused = self.marks.paused, True
            tensor = tensor.detach().contiguous()
            self.marks.paused = before
            key = tensor.untyped_storage()._cdata
            recipe.byte_offset = 0
            if valid is not None:
                valid = None if valid.dim else valid._replace(first=0, last=tensor.nbytes)
        if maker is not None:
            entry = self._made(key, tensor, *maker)
        else:
            entry = self._entry(key, tensor, region, home, valid)
        entry.handles += 1
        entry.waiting += 1
        mark = None
        if maker is not None and maker[0].checked is not When.NEVER and self.rows_of(region, tensor) is None:
            mark = mark_of(tensor)
        handle = Handle(entry, recipe, dense, mark)
        if valid is not None and not valid.sure:
            handle.inferred = True
            kept = tensor.detach()
            self.marks.wait(
                at, region.name, recipe.size, lambda: self._save_whole(handle, key, kept, region, home)
            )
        return handle

    def rows_of(self, region: Region, tensor: torch.Tensor) -> torch.Tensor | None:
        """The count of the tensor's valid rows, where others may be garbage."""
        found = self.marks.find(tensor) if region.rows is None and self.marks.any else None
        return region.rows if found is None else found[0].rows

    def _valid(
        self, region: Region, key: int, tensor: torch.Tensor, caller: FrameType | None
    ) -> Valid | None:
        """The tensor's valid rows, where somebody said that it has any, and only these are read."""
        if region.exact:
            found = row_range(tensor, region.capacity)
            assert region.rows is not None
            return None if found is None else Valid(region.rows, region.capacity, *found, sure=True)
        if not self.marks.any:
            return None
        return self.marks.saved(tensor, key, self.weights | region.weights, caller, region.name)

    def _save_whole(
        self, handle: Handle, key: int, tensor: torch.Tensor, region: Region, home: HomeName
    ) -> None:
        """What saved the tensor is not known to work row by row."""
        entry = handle.entry
        handle.inferred = False
        if entry.rows is None:
            return
        if entry.place is None and entry in region.entries:
            entry.take_all()
            return
        handle.let_go()
        handle.entry = entry = self._entry(key, tensor, region, home, None)
        entry.handles += 1
        if not handle.asked:
            entry.waiting += 1

    def _worth_moving(self, tensor: torch.Tensor, rule: Rule) -> bool:
        if self.device is None:
            self.device = tensor.device
        least = rule.least_bytes
        if tensor.nbytes < least or tensor.device != self.device:
            return False
        # An expanded view is as small as what it repeats.
        first, last = byte_range(tensor)
        return last - first >= least

    def _entry(
        self, key: int, tensor: torch.Tensor, region: Region, home: HomeName, valid: Valid | None
    ) -> Entry:
        """The entry that holds the tensor's bytes, or a new one in the region's group."""
        if valid is None:
            rows, capacity = None, 0
            first, last = byte_range(tensor)
            first -= first % 16  # so that every dtype's view starts on an element, and copies are wide
        else:
            rows, capacity, first, last = valid[:4]
        version = tensor._version
        known = self._entries.setdefault((key, home), [])
        # The weak reference keeps the storage's identity from being given to another tensor; an entry whose
        # storage is gone can no longer be the one that is being saved.
        known[:] = [entry for entry in known if entry.handles and not entry.storage.expired()]
        for entry in known:
            if entry.same_content(version, rows, capacity, first, last):
                return entry
            if rows is None and entry in region.entries and entry.covers(version, first, last):
                entry.take_all()
                return entry
            if self._extend(entry, region, version, rows, first, last):
                return entry
        entry = Entry(
            storage=StorageWeakRef(tensor.untyped_storage()),
            version=version,
            first=first,
            last=last,
            origin=tensor.detach(),
            rows=rows,
            rows_version=0 if rows is None else rows._version,
            capacity=capacity,
            covered=last - first,
            home=self.homes[home],
            region=region.name,
            rule=region.rule,
        )
        known.append(entry)
        region.entries.append(entry)
        self._of_step.append(entry)
        return entry

    def _made(self, key: int, tensor: torch.Tensor, run: Run, number: int) -> Entry:
        """The entry of a recomputed region's output, which no home need hold."""
        known = self._entries.setdefault((key, "recompute"), [])
        known[:] = [entry for entry in known if entry.handles]
        for entry in known:
            if entry.place == (run, number):
                return entry
        storage = tensor.untyped_storage()
        entry = Entry(
            storage=StorageWeakRef(storage),
            version=tensor._version,
            first=0,
            last=storage.nbytes(),
            origin=None,
            place=(run, number),
            home=self._recompute,
            region=run.name,
        )
        known.append(entry)
        self._of_step.append(entry)
        entry.home.put([entry])
        return entry

    def _extend(
        self, entry: Entry, region: Region, version: int, rows: torch.Tensor | None, first: int, last: int
    ) -> bool:
        """Widen an entry of the open group over a further view of its storage, where little is wasted."""
        if (
            entry not in region.entries
            or entry.version != version
            or rows is not None
            or entry.rows is not None
        ):
            return False
        low, high = min(entry.first, first), max(entry.last, last)
        covered = entry.covered + last - first
        if high - low > covered:
            return False
        entry.first, entry.last, entry.covered = low, high, covered
        return True

    def open(self, region: Region) -> None:
        """Nothing is decided before a tensor is saved."""

    def close(self, region: Region) -> None:
        """The region is over: its group goes to its home together, and so do those of claimed tensors."""
        if self.marks.any:
            self.marks.settle()
        if region.claims:
            # In the order of the claims.
            claimed = list(dict.fromkeys(owner for _, owner in region.claims.values()))
            region.claims = {}
            for other in claimed:
                self.close(other)
        if not region.entries:
            return
        group = [entry for entry in region.entries if entry.handles]
        region.entries = []
        for entry in group:
            # Autograd would refuse this in backward. Taking the new content would be a silent wrong gradient.
            assert entry.origin is not None
            entry.spoiled = entry.origin._version != entry.version or entry.rows_moved()
        if group:
            before, self.marks.paused = self.marks.paused, True
            try:
                group[0].home.put(group)
            finally:
                self.marks.paused = before

    def give_up(self) -> None:
        """The step ended by an exception: no backward of it will come to its end."""
        give_up(self._of_step)
        lost = set(self._of_step)
        self._entries = {key: [e for e in all_ if e not in lost] for key, all_ in self._entries.items()}
        self._recompute.give_up()
        self._keep.give_up()

    def forget(self) -> None:
        """The step is over. Drop the identities of entries that nothing holds any more."""
        self._recompute.forget()
        self._keep.forget_step()
        self._of_step = []
        alive = {key: [e for e in entries if e.handles] for key, entries in self._entries.items()}
        self._entries = {key: entries for key, entries in alive.items() if entries}

    # --- unpack: backward asks for it ---

    def was_changed(self, packed: Packed) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        if isinstance(packed, Slot):
            return False
        if isinstance(packed, (Untouched, Kept)):
            return packed.tensor._version != packed.version
        entry = packed.entry
        if entry.origin is not None and not entry.spoiled:
            entry.spoiled = entry.origin._version != entry.version
        return entry.spoiled

    @hidden
    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, Kept):
            if packed.tensor._version != packed.version:
                raise changed_in_place(packed.tensor.shape, "a tensor", packed.region)
            return packed.tensor
        if isinstance(packed, Untouched):
            if packed.tensor._version != packed.version:
                raise changed_in_place(packed.tensor.shape, "a weight or buffer", "")
            return packed.tensor
        if isinstance(packed, Slot):
            return packed.run.give(packed.number)
        entry = packed.entry
        if self.was_changed(packed):
            raise changed_in_place(packed.recipe.size, "a tensor, or its row count,", entry.region)
        if packed.inferred and entry.rows is not None:
            check_reader(packed)
        # Its region is not over: forward takes gradients inside, or an interrupt ended it.
        if entry.place is None:
            flat = entry.source().view(-1)
        else:
            if not packed.asked:
                packed.asked = True
                entry.waiting -= 1
            flat = entry.home.get(entry)
        if entry.spoiled:  # a copy under way, of which only the home knows when it is over
            raise changed_in_place(packed.recipe.size, "a tensor, or its row count,", entry.region)
        if not packed.dense:
            tensor = packed.recipe.apply(flat, entry.first)
            mark, packed.mark = packed.mark, None
            if mark is not None:
                differs = (
                    f"the output of region {entry.region!r}, which is under recompute, came out otherwise when it "
                    "was made again for the operation that saved it: either forward is not deterministic, or a "
                    "kernel changed the output in place without telling autograd. A rule of 'keep' for the region "
                    "that saved it holds it instead"
                )
                self._recompute.checks.compare(mark, tensor, entry.place[0].checked, differs)
            return tensor
        recipe = packed.recipe
        packed_rows = flat.view(recipe.dtype).view(recipe.size)
        out = torch.empty_strided(recipe.size, recipe.stride, dtype=recipe.dtype, device=flat.device)
        return out.copy_(packed_rows)
