"""The hooks that see every saved tensor: `pack` gives it a home, `unpack` (packed.py) gives the value back."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagestash.policy import HomeName, Policy
from pagestash.saved.compiled import hidden
from pagestash.saved.eight_bits import can_code, is_cast_weight
from pagestash.saved.entries import Entries
from pagestash.saved.home import Keep, TakesGroups
from pagestash.saved.one_stream import OneStream
from pagestash.saved.packed import Handle, Kept, Look, Packed, Untouched
from pagestash.saved.region import Recording, Region, frames
from pagestash.saved.rows.marks import Marks, Valid
from pagestash.saved.storage import (
    PLAIN_TENSORS,
    STRIDED,
    SavedView,
    ViewRecipe,
    byte_range,
    is_nested,
    row_range,
    saved_view,
)
from pagestash.torch_internals import (
    LOCAL_PART,
    current_transform,
    is_zero_tensor,
    next_sequence_number,
    storage_key,
)

T = TypeVar("T")


_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Of these, as most saved tensors are, none is quantized or conjugated."""


class RecomputableOutput(Protocol):
    """The output of a recomputed region, which no home need hold."""

    @property
    def moves(self) -> bool:
        """Whether a replay needs inputs that have moved, and come back on the stream of who asks."""
        ...

    def pack(self, tensor: torch.Tensor, recipe: ViewRecipe, *, whole: bool) -> Packed:
        """What stands for `tensor`, a view of the output; `whole` if no row of it may be garbage."""
        ...


class RecomputableOutputs(Protocol):
    """The outputs that can be recomputed."""

    @property
    def known(self) -> Mapping[int, object]:
        """By the storage they are in."""
        ...

    def output_of(self, key: int, tensor: torch.Tensor, *, chained: bool) -> RecomputableOutput | None: ...


class SavedTensorHooks:
    """The hooks of one keeper. They know which home a region's tensors go to, and which storages are weights."""

    def __init__(
        self,
        policy: Policy,
        homes: Mapping[HomeName, TakesGroups],
        keep: Keep,
        outputs: RecomputableOutputs,
        eight_bits: TakesGroups,
    ) -> None:
        self.policy = policy
        self.device: torch.device | None = None
        self.weights: set[int] = set()
        self.weight_shapes: set[tuple[int, ...]] = set()
        """Of all weights, where a rule has `bits`."""
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.marks = Marks()
        self.look: Look | None = None
        """Sees what becomes of every tensor, in the first steps."""
        self._homes = homes
        self._keep = keep
        self._held = keep.by_storage
        self._outputs = outputs
        self._eight_bits = eight_bits
        self._entries = Entries()
        self._stream = OneStream()

    @property
    def device_here(self) -> torch.device:
        assert self.device is not None, "no model is attached"
        return self.device

    # --- pack: forward saves a tensor ---

    @hidden
    def pack(self, tensor: torch.Tensor) -> Packed:
        """A handle for an activation; weights and what has no plain memory stay as they are."""
        current = frames()
        region: Region | None = current[-1] if current else None
        owner = None if region is None else region.owner
        if region is None or region.recorded or type(owner) is not SavedTensorHooks:
            region = owner = run = None
            for frame in reversed(current):
                if region is None and isinstance(frame.owner, SavedTensorHooks):
                    # Perhaps another keeper's, whose step is open around this one's: torch asks the inner hooks
                    # only.
                    region, owner = frame, frame.owner
                if frame.run is not None and frame.run is not run:
                    # Every recorded forward around counts it: one may lie in a region of another home, which lies
                    # in one that is recomputed itself. (It looks at our caller's frame.)
                    run = frame.run
                    run.note(tensor)
        if current_transform() is not None:
            return Untouched(tensor, tensor._version)
        if region is None:
            # A backward of a GPU, in a thread of its own, makes a graph inside.
            return Untouched.of(tensor)
        assert isinstance(owner, SavedTensorHooks)
        packed = owner.pack_in(region, tensor, False, next_sequence_number() if owner.marks.any else None)
        if owner.look is not None:
            owner.look.saw(region, tensor, packed)
        return packed

    def pack_in(
        self,
        region: Region,
        tensor: torch.Tensor,
        chained: bool = False,
        number: int | None = None,
        for_replay: bool = False,
    ) -> Packed:
        """What stands for a tensor that is saved in `region`.

        `chained`: it is saved as the input of a recomputed region. `number` is that of the next node, where there
        are marks; what no operation saves has none, and is saved whole. `for_replay`: a replay must see it to the
        last bit. It is then nobody else's object, and has no graph.
        """
        # (`plain_storage`, without a call.)
        plain = type(tensor) in PLAIN_TENSORS and tensor.layout is STRIDED and not tensor.is_nested
        key = storage_key(tensor) if plain else None
        owner = region.claimed(key) or region if region.claims else region
        run = owner.run
        if run is not None and isinstance(run, Recording) and not self._is_weight(tensor, key, region):
            outer = run.home_of(tensor, key)
            if outer is None:
                return run.discard(tensor, key, self.rows_of(owner, tensor))
            region, owner, chained = outer, outer.claimed(key) or outer, True
        version = tensor._version
        if key is None:
            return Untouched.of(tensor)
        if key in self.weights or key in region.weights:
            return Untouched(tensor, version)
        rule = owner.rule
        # (Outside all regions only outputs of recomputed ones have something else to wait in.)
        if self._outputs.known if rule is None else rule.moves:
            handle = self._handle(owner, key, version, tensor, chained, chained or for_replay, number)
            if handle is not None:
                return handle
        # Detached: with its graph, an operation's own output would keep that operation alive.
        alone = tensor if for_replay else tensor.detach()
        return Kept(alone, version, owner.name, self._keep.hold(key, alone, version, owner.name))

    def _is_weight(self, tensor: torch.Tensor, key: int | None, region: Region) -> bool:
        """Of a tensor in storage `key`; None: it is a subclass, or has another layout."""
        if key is None:
            local = getattr(tensor, LOCAL_PART, tensor)
            if local.layout != torch.strided or is_nested(local):
                return False
            key = storage_key(local)
        return key in self.weights or key in region.weights

    def _handle(
        self,
        region: Region,
        key: int,
        version: int,
        tensor: torch.Tensor,
        chained: bool,
        exact: bool,
        number: int | None,
    ) -> Packed | None:
        """A handle of what moves or is recomputed; None for what stays. What must be `exact` is not coded."""
        # What another region keeps alive anyway is worth neither a copy nor a forward. (Not what a plan lets stay:
        # that would change what is saved next, and so the order that the plan was made from.)
        held = self._held.get(key)
        if held is not None and held.version == version:
            return None
        rule, coded, keeps = region.rule, False, False
        if rule is not None and rule.bits is not None:
            coded, keeps = not exact and self._can_code(tensor), rule.home == "keep"
            if keeps and not coded:
                return None
        # The output of a recomputed region needs no home, unless a rule says to keep it.
        output = None if keeps else self._output_of(key, tensor, chained)
        least, size = 0, tensor.nbytes
        if output is None:
            if rule is None:
                return None
            least = rule.min_bytes or 0
            if size < least or not (tensor.device == self.device or self._is_here(tensor)):
                return None
        # (`byte_range`, mostly without a call.)
        first = int(tensor.storage_offset()) * tensor.element_size()
        last = first + size if tensor.is_contiguous() else byte_range(tensor, size)[1]
        # An expanded view is as small as what it repeats. Or there are no bytes to move, or they are not the
        # tensor's values as they stand.
        plain = not (tensor.is_neg() or is_zero_tensor(tensor)) and (
            tensor.dtype in _FLOATS or not (tensor.is_quantized or tensor.is_conj())
        )
        if last - first < least or not size or not plain:
            return None
        view = saved_view((tensor, key, version, first, last))
        if output is not None:
            return self._pack_output(output, region, view)
        self._stream.check(region.name)
        has_rows = region.rows is not None or self.marks.any
        valid = self._valid(region, view, number) if has_rows else None
        recipe = view.recipe()
        entry = self._entries.find(view, recipe, region, valid, coded)
        # Before the handle is made: the collector may run then, and end the others.
        entry.handles += 1
        entry.waiting += 1
        handle = Handle(entry, recipe)
        return handle if valid is None else self._wait_for_reader(handle, key, view, region, valid)

    def _output_of(self, key: int, tensor: torch.Tensor, chained: bool) -> RecomputableOutput | None:
        known = key in self._outputs.known
        return self._outputs.output_of(key, tensor, chained=chained) if known else None

    def _pack_output(self, output: RecomputableOutput, region: Region, view: SavedView) -> Packed:
        if output.moves:
            self._stream.check(region.name)
        return output.pack(view.tensor, view.recipe(), whole=self.rows_of(region, view.tensor) is None)

    def _can_code(self, tensor: torch.Tensor) -> bool:
        return can_code(tensor) and not is_cast_weight(tensor, self.weight_shapes)

    def _wait_for_reader(
        self, handle: Handle, key: int, view: SavedView, region: Region, valid: Valid | None
    ) -> Handle:
        """Where a mark cut rows off, the operation that takes in storage `key` next must read row by row."""
        if valid is None or valid.number is None:
            return handle
        handle.checks = True
        if valid.function:
            handle.function = valid.number
        else:
            alone = view._replace(tensor=view.tensor.detach())
            whole = partial(self._save_whole, handle, alone, region)
            self.marks.wait(key, region.name, handle.recipe.size, valid.number, whole)
        return handle

    def rows_of(self, region: Region, tensor: torch.Tensor) -> torch.Tensor | None:
        """The count of the tensor's valid rows, where others may be garbage."""
        found = self.marks.find(tensor) if region.rows is None and self.marks.any else None
        return region.rows if found is None else found[0].rows

    def _valid(self, region: Region, view: SavedView, number: int | None) -> Valid | None:
        """The tensor's valid rows, where it has any, and only these are read: by its claim, or by marks."""
        if region.rows is not None:
            found = row_range(view.tensor, region.capacity)
            return None if found is None else Valid(region.rows, region.capacity, *found)
        return self.marks.saved(view.tensor, number)

    def _save_whole(self, handle: Handle, view: SavedView, region: Region) -> None:
        """What saved the tensor is not known to work row by row."""
        entry = handle.entry
        handle.checks = False
        if entry.rows is None:
            return
        if entry.place is None and entry in region.entries:
            entry.take_all()
            return
        handle.let_go()
        coded = entry.dtype is not None
        handle.entry = entry = self._entries.find(view, view.recipe(), region, None, coded)
        entry.handles += 1
        if not handle.asked:
            entry.waiting += 1

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the keeper's device."""
        if self.device is None:
            self.device = tensor.device
        return tensor.device == self.device

    def start(self) -> None:
        """A step begins."""
        self._stream.start(self.device)

    # --- regions ---

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
        self._hand_over(region)

    def put_away(self, region: Region, tensor: torch.Tensor) -> Packed:
        """What stands for a tensor that is claimed in `region`, the innermost: it goes to its home now."""
        packed = self.pack(tensor)
        _, owner = region.claims.pop(storage_key(tensor))
        self._hand_over(owner)
        return packed

    def _hand_over(self, region: Region) -> None:
        """The region's group goes to its home."""
        if not region.entries:
            return
        group = []
        for entry in region.entries:
            if not entry.handles:
                entry.origin = entry.views = None  # its graph is gone, and the step lists it to its end
            else:
                # Autograd would refuse this in backward. Taking the new content would be a silent wrong gradient.
                assert entry.origin is not None
                if entry.origin._version != entry.version or (entry.rows is not None and entry.rows_moved()):
                    entry.spoiled = True
                # Until it has its place: if the collector ended its handles before, nobody would drop it there.
                entry.handles += 1
                group.append(entry)
        region.entries = []
        if group:
            assert region.rule is not None
            before, self.marks.paused = self.marks.paused, True
            try:
                self._stream.check(region.name)
                for entry in group:
                    entry.hold_slices()
                home = self._homes[region.rule.home] if region.rule.bits is None else self._eight_bits
                home.put(group)
            finally:
                self.marks.paused = before
                for entry in group:
                    entry.let_go()

    def check_stream(self, region: str) -> None:
        self._stream.check(region)

    def run_once(self, fn: Callable[[], T]) -> T:
        """No region around is recomputed."""
        return fn()

    def give_up(self) -> None:
        """The step was ended by an exception: no backward of it will come to its end."""
        self._entries.give_up()

    def forget(self) -> None:
        """The step is over."""
        self._entries.forget()
