"""Record every tensor that autograd saves: region, storage, kind of memory, and lifetime."""

import gc
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pagestash.profiling.memory import MemoryMeter
from pagestash.profiling.records import ALLOCATED, BATCH, OUTPUT, USER, SavedTensor
from pagestash.profiling.split_backward import WaitingGradients
from pagestash.profiling.storages import (
    Alive,
    Handle,
    ObserveCasts,
    Saved,
    Storages,
    is_plain,
    local_part,
    plain_tensors,
)
from pagestash.profiling.timeline import Timeline
from pagestash.profiling.tracker import RegionTracker
from pagestash.saved.compiled import hidden, is_compiled
from pagestash.saved.recompute.trees import tensors_of
from pagestash.saved.region import Region, frames
from pagestash.saved.rows.marks import Valid
from pagestash.saved.storage import byte_range, row_range
from pagestash.torch_internals import (
    key_of_storage,
    next_sequence_number,
    storage_key,
    storage_references,
    tree_leaves,
)


class TensorRecorder:
    """The hooks of one recorded step; call `tensors()` after its backward."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        timeline: Timeline,
        device: torch.device,
        meter: MemoryMeter | None = None,
    ) -> None:
        self.tracker = RegionTracker(model, timeline, self)
        self.inputs: dict[str, set[int]] = {}
        self.outputs: dict[str, set[int]] = {}
        self._floating: set[int] = set()
        """Storages that a module returned as floating-point."""
        self.waiting = WaitingGradients(timeline)
        self._model = model
        self._given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._timeline = timeline
        self._device = device
        self._meter = meter
        self._alive = Alive()
        self._storages = Storages(model, batch)
        self._saved: list[Saved] = []
        self._looked_at = 0
        """How many of them are known to be held, and by whom else."""
        self._inputs_of_layers: set[int] = set()
        """Storages that recomputed layers hold."""
        self._requests = 0
        self._tell_casts = not any(map(is_compiled, model.modules()))
        self._before = 0
        self.allocated_bytes: int | None = None
        """Bytes that forward left allocated, without its result; None without a GPU."""
        self.other_bytes: int | None = None
        """Bytes allocated before the step, not by this model, such as libraries' workspace; None without a GPU."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record what is saved within this context."""
        gc.collect()  # an old model freed in the middle of this would falsify the count
        self._before = self._allocated()
        if self._device.type == "cuda":
            self.other_bytes = max(0, self._before - self._model_bytes())
        with self.tracker.forward(), self.watching():
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is saved within this context, in the regions that are open."""
        casts = ObserveCasts(self._storages) if self._tell_casts else nullcontext()
        with casts, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    # --- modules ---

    def entered(self, name: str, module: nn.Module, given: Any) -> None:
        # FSDP2 gives a module new parameter storage just before its forward.
        self._storages.note_weights(module.parameters(recurse=False))
        self.inputs.setdefault(name, set()).update(self._storages.of(t).number for t in plain_tensors(given))

    def unsaved_inputs(self, name: str, saved: set[int]) -> tuple[tuple[int, int], ...]:
        """A region's inputs that nobody saves and that the step made: storage and bytes."""
        own = self.inputs.get(name, set()) - saved
        there = self._storages.buffers | self._storages.batch | self._storages.weights.keys()
        made = (s for s in self._storages.by_key.values() if s.number in own and s.weak.key not in there)
        return tuple((storage.number, storage.size) for storage in made)

    def unsaved_outputs(self, name: str, taken: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """What the region made of `taken`, unsaved inputs of regions: storage and bytes."""
        made = (self.outputs.get(name, set()) - self.inputs.get(name, set())) & self._floating & taken.keys()
        return tuple((number, taken[number]) for number in sorted(made))

    def left(self, name: str, result: Any) -> None:
        for tensor in plain_tensors(result):
            storage = self._storages.of(tensor)
            storage.made_by = storage.made_by or name
            self.outputs.setdefault(name, set()).add(storage.number)
            if tensor.is_floating_point():
                self._floating.add(storage.number)

    def decided(self, result: Any) -> None:
        # A recomputed region holds it for its replay, as it holds its inputs.
        parts = map(local_part, tensors_of(result))
        numbers = {self._storages.of(local).number for local in parts if is_plain(local)}
        for name in self.tracker.path():
            self.inputs.setdefault(name, set()).update(numbers)

    # --- saved tensors ---

    @hidden
    def _pack(self, tensor: torch.Tensor) -> Any:
        local = local_part(tensor)
        if local.layout != torch.strided or not local.numel():
            return tensor.detach()
        frame = frames()[-1]
        path = self.tracker.path()
        storage = self._storages.of(local)
        claimed = frame.claimed(storage_key(local))
        if claimed is not None and claimed.name != path[-1]:
            path = (*path, claimed.name)
        span = byte_range(local)
        saved = Saved(
            path=path,
            shape=tuple(local.shape),
            dtype=str(local.dtype).removeprefix("torch."),
            device=str(local.device),
            kind=self._storages.kind(local),
            nbytes=min(
                local.nbytes, span[1] - span[0]
            ),  # an expanded view has only the bytes that it repeats
            storage=storage,
            at=self._timeline.now,
            valid=span,
            span=span,
            once=self.tracker.inside_once,
            claimed=claimed is not None,
            has_rows=claimed is not None and claimed.rows is not None,
            block=self.tracker.block(),
            claim=0 if claimed is None else list(frame.claims).index(storage_key(local)),
        )
        rows = self._rows(local, frame, claimed)
        if rows is not None:
            saved.valid = self._valid(rows)
            if rows.number is not None and not rows.function:

                def whole() -> None:
                    saved.valid = span

                frame.owner.marks.wait(storage_key(local), frame.name, local.shape, rows.number, whole)
        storage.handles += 1
        self._saved.append(saved)
        # A new tensor object: an output that held itself would never be freed.
        return Handle(tensor.detach(), saved, self._timeline)

    def _rows(self, tensor: torch.Tensor, frame: Region, claimed: Region | None) -> Valid | None:
        """The tensor's valid rows, if it is marked or claimed with rows."""
        if claimed is not None and claimed.rows is not None:
            found = row_range(tensor, claimed.capacity)
            return None if found is None else Valid(claimed.rows, claimed.capacity, *found)
        marks = frame.owner.marks
        if not marks.any:
            return None
        return marks.saved(tensor, next_sequence_number())

    def _valid(self, rows: Valid) -> tuple[int, int]:
        # The host waits for the count: the recorded step is not timed.
        return rows.first, rows.first + int(rows.rows) * ((rows.last - rows.first) // rows.capacity)

    @hidden
    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Handle):
            return packed
        saved, storage = packed.saved, packed.saved.storage
        if saved.asked is None:
            self._requests += 1
            saved.asked = self._timeline.now, self._requests
        if storage.needed_at is None:
            storage.needed_at, storage.request = saved.asked
            if self._meter is not None:
                storage.beside_bytes = max(0, self._meter.now() - self._alive.bytes)
        return packed.tensor

    def look_around(self, output: Any, loss: torch.Tensor) -> None:
        """At the end of forward: read the allocator, and find what else holds the saved storages."""
        self.waiting.watch(loss, self._given)
        outputs = self._storages.keys(plain_tensors((output, loss)))
        if self._device.type == "cuda":
            loose = [self._storages.by_key[key] for key in outputs]
            result = sum(s.size for s in loose if not s.handles and s.weak.key not in self._storages.batch)
            self.allocated_bytes = self._allocated() - self._before - result
        self._look_at_saved(outputs)

    def holds(self, storages: Iterable[int]) -> None:
        """A recomputed layer holds these storages, by their keys."""
        self._inputs_of_layers.update(storages)

    def look_at_replay(self, results: Iterable[torch.Tensor]) -> None:
        """At the end of a layer's replay: the same for what it saved."""
        self._look_at_saved(self._storages.keys(plain_tensors(list(results))), replayed=True)

    def _look_at_saved(self, outputs: Container[int], *, replayed: bool = False) -> None:
        # Tensors of an operation whose result was not used are freed already.
        new = [saved for saved in self._saved[self._looked_at :] if saved.held]
        self._saved[self._looked_at :] = new
        self._looked_at = len(self._saved)
        for saved in new:
            saved.storage.saved.append(saved)
            if saved.kind in ALLOCATED and saved.storage.alive is None and saved.device == str(self._device):
                saved.storage.alive = self._alive
                self._alive.bytes += saved.storage.size
        extra = _references_of_its_own()
        for storage in dict.fromkeys(saved.storage for saved in new):
            key = storage.weak.key
            others = storage_references(key) - extra - storage.handles
            if others <= 0 or key in self._storages.weights or key in self._storages.buffers:
                continue
            if key in self._storages.batch:
                storage.holders = (BATCH,)
            elif key in self._inputs_of_layers or (replayed and key in outputs):
                continue  # by a layer's replay, and by nobody in a step without
            elif key in outputs:
                storage.holders = (OUTPUT,)
            elif storage.made_by is not None:
                storage.holders = (f"output of {storage.made_by}",)
            else:
                storage.holders = (USER,)

    def tensors(self) -> list[SavedTensor]:
        """All saved tensors in the order of forward; a storage counts with its first tensor."""
        seen: set[int] = set()
        last = self._timeline.now
        found = []
        for saved in self._saved:
            storage = saved.storage
            first = storage.number not in seen and saved.device == str(self._device)
            seen.add(storage.number)
            regions = dict.fromkeys(other.path[-1] for other in storage.saved)
            others = [name or "(model)" for name in regions if name != saved.path[-1]]
            freed_at = last if storage.freed_at is None else storage.freed_at
            found.append(
                SavedTensor(
                    region=saved.path[-1],
                    path=saved.path,
                    shape=saved.shape,
                    dtype=saved.dtype,
                    device=saved.device,
                    kind=saved.kind,
                    bytes=saved.nbytes,
                    storage=storage.number,
                    storage_bytes=storage.size,
                    counted=storage.size if first and saved.kind in ALLOCATED else 0,
                    valid_bytes=storage.valid_bytes(),
                    held_by=(*others, *storage.holders),
                    saved_at=saved.at,
                    needed_at=freed_at if storage.needed_at is None else storage.needed_at,
                    freed_at=freed_at,
                    beside_bytes=storage.beside_bytes,
                    once=saved.once,
                    claimed=saved.claimed,
                    has_rows=saved.has_rows,
                    block=saved.block,
                    claim=saved.claim,
                    request=storage.request,
                    span=saved.span,
                    asked=(last, self._requests + 1) if saved.asked is None else saved.asked,
                    done_at=last if saved.done_at is None else saved.done_at,
                )
            )
        return found

    def numbers(self) -> dict[int, int]:
        """The number of each storage by its key."""
        return {key: storage.number for key, storage in self._storages.by_key.items()}

    def _allocated(self) -> int:
        """Bytes requested and not freed, before the allocator rounds them up."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self._device)["requested_bytes.all.current"]

    def _model_bytes(self) -> int:
        """Bytes of the model on the device, its gradients included."""
        gradients = (p.grad for p in self._model.parameters() if p.grad is not None)
        known = map(local_part, (*self._model.parameters(), *self._model.buffers(), *gradients))
        here = (tensor for tensor in known if is_plain(tensor) and tensor.device == self._device)
        return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in here}.values())


def _references_of_its_own() -> int:
    """References to a storage that its Python object holds, besides those of tensors."""
    tensor = torch.empty(1)
    return storage_references(key_of_storage(tensor.untyped_storage())) - 1
