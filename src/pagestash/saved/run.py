"""A region that will be run again: its first forward, and what it takes to repeat it.

A region's first forward is a `Run`. Every tensor that an operation in it saves is counted; those the region
drops are `Slot`s, known by their number. `Rerun` runs forward again, counts the same way, takes the tensors that
are waited for, and stops when it has them. Gradients flow through the first forward's graph, so nothing else of
the second one is ever used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pagestash.policy import Rule
from pagestash.saved.compiled import hidden
from pagestash.saved.generators import Others, others_drawn_since, others_state
from pagestash.saved.objects import Objects, may_change
from pagestash.saved.once import once
from pagestash.saved.packed import Handle, Packed
from pagestash.saved.region import Recording, Region, frames, set_frames
from pagestash.saved.rerun import Layout, Rerun, layout
from pagestash.saved.storage import Entry, ViewRecipe, byte_range, checksum, plain_storage
from pagestash.saved.surroundings import (
    Random,
    Surroundings,
    drawn_since,
    random_state,
)
from pagestash.saved.trees import map_leaves, tensors_of
from pagestash.saved.values import When, mark_of

if TYPE_CHECKING:
    from pagestash.saved.hooks import SavedTensorHooks
    from pagestash.saved.recompute import Recompute


@dataclass(slots=True, eq=False)
class Slot(Packed):
    """A discarded tensor: the number under which its region saved it."""

    run: "Run"
    number: int

    moved = True

    @hidden
    def __del__(self) -> None:
        self.run.forget(self.number)

    def changed(self) -> bool:
        return False  # a replay makes it as it was, and looks itself

    def unpack(self) -> torch.Tensor:
        return self.run.give(self.number)


class _Held:
    """A tensor that a region takes in or decides on, packed. (No dataclass: those are looked into.)"""

    __slots__ = ("mark", "packed", "requires_grad")

    def __init__(self, packed: Packed, requires_grad: bool, mark: torch.Tensor | None) -> None:
        self.packed, self.requires_grad, self.mark = packed, requires_grad, mark


@dataclass(slots=True, eq=False)
class OutputHandle(Handle):
    """A saved tensor that is an output of a recomputed region: its entry's place is an `Output`."""

    run: "Run" = field(kw_only=True)
    summary: torch.Tensor | None = None
    """Of its values, until they were compared."""

    @property
    def recomputed_by(self) -> str:  # type: ignore[override]
        return self.run.name

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        tensor = Handle.view(self, flat)
        summary, self.summary = self.summary, None
        if summary is not None:
            self.run.compare(
                summary,
                tensor,
                f"the output of region {self.run.name!r}, which is under recompute, came out otherwise when it "
                "was recomputed for the operation that saved it: either forward is not deterministic, or a "
                "kernel changed the output in place without telling autograd. A rule of 'keep' for the region "
                "that saved it holds it instead",
            )
        return tensor


@dataclass(slots=True, eq=False)
class Output:
    """An output of a recorded forward; the place of the entry that stands for it."""

    run: "Run"
    number: int

    def pack(self, tensor: torch.Tensor, recipe: ViewRecipe, *, whole: bool) -> OutputHandle:
        """A handle of `tensor`, a view of the output; `whole` if no row of it may be garbage."""
        entry = self.run.outputs.get(self.number)
        if entry is None:
            storage = tensor.untyped_storage()
            entry = Entry(
                storage=StorageWeakRef(storage),
                version=tensor._version,
                first=0,
                last=storage.nbytes(),
                origin=None,
                place=self,
                region=self.run.name,
            )
            self.run.add_output(self.number, entry)
        entry.handles += 1
        entry.waiting += 1
        checked = whole and self.run.checked is not When.NEVER
        return OutputHandle(entry, recipe, run=self.run, summary=mark_of(tensor) if checked else None)

    def get(self, entry: Entry) -> torch.Tensor:
        made = self.run.give_output(self.number, last=not entry.waiting)
        flat = torch.empty(0, dtype=torch.uint8, device=made.device)
        return flat.set_(made.untyped_storage(), entry.first, (entry.length,), (1,))

    def drop(self, entry: Entry) -> None:
        self.run.forget_output(self.number)


class Run(Recording):
    """One forward of a region: what it takes to run it again, and what waits for that."""

    def __init__(
        self,
        home: "Recompute",
        capture: "SavedTensorHooks",
        outer: Region,
        path: Sequence[nn.Module],
        name: str,
        rule: Rule,
        arguments: tuple[tuple, dict[str, Any]],
    ) -> None:
        self.name = name
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.outputs: dict[int, Entry] = {}  # those that a later region saved
        self.layouts: dict[int, Layout] = {}
        self.marks: dict[int, torch.Tensor] = {}
        self.checked = home.checks.due(path[-1])
        self.dropped = 0
        self.weight = 0
        """Bytes that running the region again brings back, with those of the regions it must run before."""
        self._home = home
        self._saved = capture
        self._outer: Region | None = outer  # while forward runs
        self._path = path
        self._least = rule.least_bytes
        self._decisions: list[tuple[Any, Random | None, Others | None]] = []
        self._alive: set[int] = set()
        self._to_mark: list[tuple[int, torch.Tensor, int]] = []
        self._made: dict[int, torch.Tensor] = {}
        self._made_outputs: dict[int, torch.Tensor] = {}
        self._made_on: torch.cuda.Stream | None = None
        self._storages: dict[int, StorageWeakRef] = {}
        self._taken_in: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._objects = Objects(name)
        self._take_in(arguments)
        self._inputs = self._hold(arguments, outer, chained=True)
        self._surroundings = Surroundings(
            self.module, name, capture.device_here, home.known, look=self.checked is not When.NEVER
        )

    @property
    def module(self) -> nn.Module:
        return self._path[-1]

    def weight_storages(self) -> set[int]:
        """The storages of the module's weights and buffers."""
        return self._surroundings.storages()

    # --- the first forward ---

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor that an operation inside saved, whatever becomes of it."""
        self.saved.append((tensor.shape, tensor.dtype))

    def home_of(self, tensor: torch.Tensor) -> Region | None:
        """The region whose home takes a tensor saved in this one: None if it is dropped.

        What is taken in is held in any case; what is below `min_bytes` stays.
        """
        assert self._outer is not None
        if tensor.nbytes < self._least:
            return self._outer
        key = plain_storage(tensor)
        taken_in = self._taken_in.get(key, ()) if key is not None else ()
        at = byte_range(tensor) if taken_in else None
        return self._outer if any(byte_range(given) == at for given, _ in taken_in) else None

    def discard(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> Slot:
        """Let go of the tensor that was counted last; where there are `rows`, others may be garbage."""
        key = plain_storage(tensor)
        if key is not None and key not in self._storages and key not in self._taken_in:
            # The weak reference keeps the key from being given to another storage.
            self._storages[key] = StorageWeakRef(tensor.untyped_storage())
            self.dropped += tensor.untyped_storage().nbytes()
        number = len(self.saved) - 1
        self._alive.add(number)
        if self.checked is not When.NEVER and rows is None and key is not None:
            self._to_mark.append((number, tensor.detach(), tensor._version))
        return Slot(self, number)

    def run_once(self, fn: Callable[[], Any]) -> Any:
        """Run `fn` as if it stood outside the region, and remember its result."""
        assert self._outer is not None
        current, device = frames(), self._saved.device_here
        start = next(index for index, frame in enumerate(current) if frame.run is self)
        inner = current[-1]
        region = inner
        if inner.run is not None:
            region = Region(
                self._saved, self.name, self._outer.rule, inner.rows, inner.capacity, weights=inner.weights
            )
        before = random_state(device)
        others = others_state() if self._surroundings.watches_others() else None
        set_frames((*current[:start], region))
        try:
            result = once(fn)  # which a forward around this one may have to remember, too
            drawn = drawn_since(device, before)
            after = random_state(device) if drawn else None
            drawn = others is not None and others_drawn_since(others)
            self._decisions.append((self._hold(result, region), after, others_state() if drawn else None))
            if region is not inner:
                self._take_in(result)
            return result
        finally:
            set_frames(current)
            if region is not inner:
                self._saved.close(region)

    def _take_in(self, tree: Any) -> None:
        """These tensors are held: where an operation saves one, there is nothing to drop."""
        for tensor in tensors_of(tree):
            key = plain_storage(tensor)
            if key is not None and not tensor.is_inference():
                self._taken_in.setdefault(key, []).append((tensor.detach(), tensor._version))

    def close(self, weights: set[int], output: Any) -> None:
        """The first forward is over: its outputs can be made again from here on."""
        self._surroundings.close()
        self._objects.close()
        self._outer = None
        for tensors in self._taken_in.values():
            for tensor, version in tensors:
                if tensor._version != version:
                    raise RuntimeError(
                        f"region {self.name!r} is under recompute, and changes its input of shape "
                        f"{tuple(tensor.shape)} in place (or what it got from once()), so that it could not be run "
                        "again; clone it first, or give the region another home"
                    )
        made: dict[int, torch.Tensor] = {}
        for number, tensor in enumerate(tensors_of(output)):
            key = plain_storage(tensor)
            if key is None or key in weights or key in self._taken_in or key in made:
                continue  # it was there before
            if tensor.numel() == 1 or not tensor.is_floating_point():
                continue  # a scalar is not worth a forward, and a choice is never made again
            made[key] = tensor
            self.layouts[number] = layout(tensor)
            if self.saved:  # else another's hooks took it all, a checkpoint's, whose business it is
                self._home.remember(key, tensor, self, number)
        self.weight += self.dropped + sum(tensor.untyped_storage().nbytes() for tensor in made.values())
        # Only now: the operation that saved a tensor may not have filled it then.
        for number, tensor, version in self._to_mark:
            mark = mark_of(tensor) if tensor._version == version else None
            if mark is not None:
                self.marks[number] = mark
                if (
                    tensor.is_cuda
                ):  # it may be of another stream, which takes its memory as soon as it is free
                    tensor.record_stream(torch.cuda.current_stream())
        self._to_mark = []
        self._taken_in = {}
        self._storages = {}

    def _hold(self, tree: Any, region: Region, *, chained: bool = False) -> Any:
        """`tree` with its tensors packed in `region`'s home."""
        known: dict[int, _Held] = {}

        def hold(leaf: Any) -> Any:
            # (An inference tensor is never saved and has no version; outside inference mode nothing changes it.)
            if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
                if chained and may_change(leaf):
                    self._objects.add(leaf)
                return leaf
            # One tensor in two places is one the next time, too: attention asks whether `query is key`.
            held = known.get(id(leaf))
            if held is not None:
                return held
            packed = self._saved.pack_in(region, leaf.detach(), chained=chained)
            output = isinstance(packed, OutputHandle)
            if isinstance(packed, OutputHandle):
                self.weight += packed.run.weight
            mark = None
            whole = plain_storage(leaf) is not None and self._saved.rows_of(region, leaf) is None
            if self.checked is not When.NEVER and whole:
                # Of what is held, every bit.
                mark = mark_of(leaf) if output else checksum(leaf)
            held = known[id(leaf)] = _Held(packed, leaf.requires_grad, mark)
            return held

        return map_leaves(hold, tree)

    def add_output(self, number: int, entry: Entry) -> None:
        """A later region saved the output, and `entry` stands for it."""
        self.outputs[number] = entry
        self._home.note_entry(entry)

    # --- backward ---

    def compare(self, summary: torch.Tensor, tensor: torch.Tensor, differs: str) -> None:
        """Raise `differs` if `tensor` has other values than `summary` was made of."""
        self._home.checks.compare(summary, tensor, self.checked, differs)

    def give(self, number: int) -> torch.Tensor:
        """The tensor saved under `number`; whoever asks again has the region run again."""
        self._home.prune()
        with self._home.lock:
            if number not in self._made:
                self._make()
            tensor = self._made.pop(number)
        self._home.release(self.name, tensor)
        return self._in_order(tensor)

    def give_output(self, number: int, last: bool) -> torch.Tensor:
        """An output; it waits here until the `last` of those who saved it has asked."""
        self._home.prune()
        with self._home.lock:
            if number not in self._made_outputs:
                self._make(number)
            tensor = self._made_outputs[number]
            if last:
                del self._made_outputs[number]
                self._home.release(self.name, tensor)
        return self._in_order(tensor)

    def forget(self, number: int) -> None:
        """Nothing can ask for that tensor any more."""
        self._alive.discard(number)
        tensor = self._made.pop(number, None)
        if tensor is not None:
            self._home.release(self.name, tensor)

    def forget_output(self, number: int) -> None:
        self.outputs.pop(number, None)
        tensor = self._made_outputs.pop(number, None)
        if tensor is not None:
            self._home.release(self.name, tensor)

    def _make(self, output: int | None = None) -> None:
        if self._outer is not None:
            raise RuntimeError(
                f"region {self.name!r} is under recompute, and takes gradients inside its own forward, which needs "
                "what it has just dropped; give it another home"
            )
        self.release_made()  # they are made again, too
        self._home.making.add(self)
        outputs: set[int] = set()
        if output is not None:  # it runs to its end then, where the others are, too
            outputs = {output} | {number for number, entry in self.outputs.items() if entry.waiting}
        rerun = Rerun(self, set(self._alive), outputs)
        rerun.go()
        for found, made in ((rerun.found, self._made), (rerun.outputs, self._made_outputs)):
            for number, tensor in found.items():
                self._home.hold(self.name, tensor)
                made[number] = tensor
        # Another thread may have ended its part of backward meanwhile, and found nothing to forget.
        for number in rerun.found.keys() - self._alive:
            self.forget(number)
        on_gpu = self._saved.device_here.type == "cuda"
        self._made_on = torch.cuda.current_stream() if on_gpu else None

    def release_made(self) -> None:
        """Let go of what was made again; whoever asks for it has it made once more."""
        for made in (self._made, self._made_outputs):
            while made:
                self._home.release(self.name, made.popitem()[1])

    def _in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor may have been made for an operation on another stream than the one that asks now."""
        if self._made_on is not None and tensor.is_cuda:
            here = torch.cuda.current_stream()
            if here != self._made_on:
                here.wait_stream(self._made_on)
                tensor.record_stream(here)
        return tensor

    def again_from(self, tree: Any) -> Any:
        """What was held, as tensors of their own without a graph."""
        known: dict[_Held, torch.Tensor] = {}

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, _Held):
                return leaf
            if leaf in known:
                return known[leaf]
            changed = (
                f"region {self.name!r} is under recompute, and a tensor that it took in was changed in place "
                "before backward, so that it cannot be run again; clone it before changing it, or give the "
                "region another home"
            )
            if leaf.packed.changed():
                raise RuntimeError(changed)
            tensor = leaf.packed.unpack().detach()
            mark, leaf.mark = leaf.mark, None
            if mark is not None:
                self._home.checks.compare(mark, tensor, self.checked, changed)
            known[leaf] = tensor.requires_grad_(leaf.requires_grad)
            return tensor

        return map_leaves(bring, tree)
