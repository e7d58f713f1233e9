"""Record every tensor that autograd saves: region, storage, kind of memory, and lifetime."""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pagestash.profiling.memory import MemoryMeter
from pagestash.profiling.records import ALLOCATED, BATCH, OUTPUT, USER, Kind, SavedTensor
from pagestash.profiling.split_backward import WaitingGradients
from pagestash.profiling.timeline import Path, Timeline
from pagestash.profiling.tracker import RegionTracker
from pagestash.saved.compiled import hidden, is_compiled
from pagestash.saved.recompute.trees import tensors_of
from pagestash.saved.region import Region, frames
from pagestash.saved.storage import byte_range, row_range
from pagestash.saved.valid_rows.mark import Valid
from pagestash.torch_internals import (
    LOCAL_PART,
    StorageWeakRef,
    TorchDispatchMode,
    key_of_storage,
    storage_key,
    storage_references,
    tree_leaves,
)

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True, eq=False)
class _Alive:
    """Bytes of saved storages that the step allocated and backward still holds."""

    bytes: int = 0


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage. The weak reference keeps its address from being reused, so the key stays unique."""

    number: int
    weak: StorageWeakRef
    size: int
    saved: list["_Saved"] = field(default_factory=list)
    """Its saved tensors that are still held at the end of forward."""
    made_by: str | None = None
    """The first module that returned it."""
    handles: int = 0
    holders: tuple[str, ...] = ()
    needed_at: int | None = None
    request: int = 0
    freed_at: int | None = None
    beside_bytes: int | None = None
    alive: _Alive | None = None
    """Where it counts, from the end of forward on."""

    def valid_bytes(self) -> int:
        """Bytes that backward reads."""
        covered, end = 0, 0
        for first, last in sorted(saved.valid for saved in self.saved):
            covered += max(0, last - max(first, end))
            end = max(end, last)
        return covered


@dataclass(slots=True, eq=False)
class _Saved:
    path: Path
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Kind
    nbytes: int
    storage: _Storage
    at: int
    valid: tuple[int, int]
    """Byte range of the storage that backward reads."""
    span: tuple[int, int]
    once: bool
    claimed: bool
    has_rows: bool
    held: bool = True
    asked: tuple[int, int] | None = None
    done_at: int | None = None


@dataclass(slots=True, eq=False)
class _Handle:
    """What autograd holds instead of the tensor. When it is freed, backward is done with the tensor."""

    tensor: torch.Tensor
    saved: _Saved
    timeline: Timeline

    @hidden
    def __del__(self) -> None:
        storage = self.saved.storage
        self.saved.held = False
        self.saved.done_at = self.timeline.now
        storage.handles -= 1
        if not storage.handles:
            storage.freed_at = self.timeline.now
            if storage.alive is not None:
                storage.alive.bytes -= storage.size


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
        self.waiting = WaitingGradients(timeline)
        self._model = model
        self._given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._timeline = timeline
        self._device = device
        self._meter = meter
        self._alive = _Alive()
        self._storages: dict[int, _Storage] = {}
        self._saved: list[_Saved] = []
        self._requests = 0
        self._weights: dict[int, set[Layout]] = {}
        self._casts: set[int] = set()
        self._buffers = self._keys(model.buffers())
        self._batch = self._keys(_tensors(batch))
        self._tell_casts = not any(map(is_compiled, model.modules()))
        self._note_weights(model.parameters())
        self._before = 0
        self.allocated_bytes: int | None = None
        """Bytes that forward left allocated, without its result; None without a GPU."""
        self.other_bytes: int | None = None
        """Bytes allocated before the step, not by this model, such as libraries' workspace; None without a GPU."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record what is saved within this context."""
        casts = _Casts(self) if self._tell_casts else nullcontext()
        gc.collect()  # an old model freed in the middle of this would falsify the count
        self._before = self._allocated()
        if self._device.type == "cuda":
            self.other_bytes = max(0, self._before - self._model_bytes())
        with (
            self.tracker.forward(),
            casts,
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
        ):
            yield

    # --- modules ---

    def entered(self, name: str, module: nn.Module, given: Any) -> None:
        # FSDP2 gives a module new parameter storage just before its forward.
        self._note_weights(module.parameters(recurse=False))
        self.inputs.setdefault(name, set()).update(self._storage(t).number for t in _tensors(given))

    def unsaved_inputs(self, name: str, saved: set[int]) -> tuple[tuple[int, int], ...]:
        """A region's inputs that nobody saves and that the step made: storage and bytes."""
        own = self.inputs.get(name, set()) - saved
        there = self._buffers | self._batch | self._weights.keys()
        made = (s for s in self._storages.values() if s.number in own and s.weak.cdata not in there)
        return tuple((storage.number, storage.size) for storage in made)

    def left(self, name: str, result: Any) -> None:
        for tensor in _tensors(result):
            storage = self._storage(tensor)
            storage.made_by = storage.made_by or name
            self.outputs.setdefault(name, set()).add(storage.number)

    def decided(self, result: Any) -> None:
        # A recomputed region holds it for its replay, as it holds its inputs.
        numbers = {self._storage(local).number for local in map(_local, tensors_of(result)) if _plain(local)}
        for name in self.tracker.path():
            self.inputs.setdefault(name, set()).update(numbers)

    # --- saved tensors ---

    @hidden
    def _pack(self, tensor: torch.Tensor) -> Any:
        local = _local(tensor)
        if local.layout != torch.strided or not local.numel():
            return tensor.detach()
        frame = frames()[-1]
        path = self.tracker.path()
        storage = self._storage(local)
        claimed = frame.claimed(storage_key(local))
        if claimed is not None and claimed.name != path[-1]:
            path = (*path, claimed.name)
        span = byte_range(local)
        saved = _Saved(
            path=path,
            shape=tuple(local.shape),
            dtype=str(local.dtype).removeprefix("torch."),
            device=str(local.device),
            kind=self._kind(local),
            nbytes=min(
                local.nbytes, span[1] - span[0]
            ),  # an expanded view has only the bytes that it repeats
            storage=storage,
            at=self._timeline.now,
            valid=span,
            span=span,
            once=self.tracker.inside_once,
            claimed=claimed is not None,
            has_rows=claimed is not None and claimed.exact,
        )
        rows = self._rows(local, frame, claimed)
        if rows is not None:
            saved.valid = self._valid(rows)
            if not rows.sure:

                def whole() -> None:
                    saved.valid = span

                frame.owner.marks.wait(storage_key(local), frame.name, local.shape, whole)
        storage.handles += 1
        self._saved.append(saved)
        # A new tensor object: an output that held itself would never be freed.
        return _Handle(tensor.detach(), saved, self._timeline)

    def _rows(self, tensor: torch.Tensor, frame: Region, claimed: Region | None) -> Valid | None:
        """The tensor's valid rows, if it is marked or claimed with rows."""
        if claimed is not None and claimed.exact and claimed.rows is not None:
            found = row_range(tensor, claimed.capacity)
            return None if found is None else Valid(claimed.rows, claimed.capacity, *found, sure=True)
        marks = frame.owner.marks
        if not marks.any:
            return None
        return marks.saved(tensor, storage_key(tensor), set(self._weights), sys._getframe(2), frame.name)

    def _valid(self, rows: Valid) -> tuple[int, int]:
        # The host waits for the count: the recorded step is not timed.
        return rows.first, rows.first + int(rows.rows) * ((rows.last - rows.first) // rows.capacity)

    @hidden
    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Handle):
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
        # Tensors of an operation whose result was not used are freed already.
        self._saved = [saved for saved in self._saved if saved.held]
        for saved in self._saved:
            saved.storage.saved.append(saved)
            if saved.kind in ALLOCATED and saved.storage.alive is None and saved.device == str(self._device):
                saved.storage.alive = self._alive
                self._alive.bytes += saved.storage.size
        self.waiting.watch(loss, self._given)
        outputs = self._keys(_tensors((output, loss)))
        if self._device.type == "cuda":
            loose = [self._storages[key] for key in outputs]
            result = sum(s.size for s in loose if not s.handles and s.weak.cdata not in self._batch)
            self.allocated_bytes = self._allocated() - self._before - result
        extra = _references_of_its_own()
        for key, storage in self._storages.items():
            if not storage.handles or storage.weak.expired():
                continue
            others = storage_references(key) - extra - storage.handles
            if others <= 0 or key in self._weights or key in self._buffers:
                continue
            if key in self._batch:
                storage.holders = (BATCH,)
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
                    needed_at=last if storage.needed_at is None else storage.needed_at,
                    freed_at=last if storage.freed_at is None else storage.freed_at,
                    beside_bytes=storage.beside_bytes,
                    once=saved.once,
                    claimed=saved.claimed,
                    has_rows=saved.has_rows,
                    request=storage.request,
                    span=saved.span,
                    asked=(last, self._requests + 1) if saved.asked is None else saved.asked,
                    done_at=last if saved.done_at is None else saved.done_at,
                )
            )
        return found

    def _allocated(self) -> int:
        """Bytes requested and not freed, before the allocator rounds them up."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self._device)["requested_bytes.all.current"]

    def _model_bytes(self) -> int:
        """Bytes of the model on the device, its gradients included."""
        gradients = (p.grad for p in self._model.parameters() if p.grad is not None)
        known = map(_local, (*self._model.parameters(), *self._model.buffers(), *gradients))
        here = (tensor for tensor in known if _plain(tensor) and tensor.device == self._device)
        return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in here}.values())

    # --- identity ---

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        known = self._storages.get(key_of_storage(storage))
        if known is None:
            known = _Storage(len(self._storages), StorageWeakRef(storage), storage.nbytes())
            self._storages[key_of_storage(storage)] = known
        return known

    def _keys(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The storages' keys, which stay unique while this recorder lives."""
        return {self._storage(local).weak.cdata for local in map(_local, tensors) if _plain(local)}

    def _note_weights(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in map(_local, parameters):
            if _plain(parameter):
                key = self._storage(parameter).weak.cdata
                self._weights.setdefault(key, set()).add(_layout(parameter))

    def _kind(self, tensor: torch.Tensor) -> Kind:
        key = storage_key(tensor)
        if key in self._weights:
            return "weight" if _layout(tensor) in self._weights[key] else "weight_view"
        if key in self._casts:
            return "weight_cast"
        if key in self._buffers:
            return "buffer"
        return "input" if key in self._batch else "activation"

    def made(self, results: Any, sources: Any) -> None:
        """An operation ran: results computed from weights alone, such as autocast's casts, count as casts."""
        found = list(_tensors(sources))
        if not found or not all(self._of_weights(tensor) for tensor in found):
            return
        for tensor in _tensors(results):
            key = self._storage(tensor).weak.cdata
            if key not in self._weights:
                self._casts.add(key)

    def _of_weights(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._weights or key in self._casts


class _Casts(TorchDispatchMode):
    """Observes operations below autograd and autocast."""

    def __init__(self, recorder: TensorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorder.made(result, (args, kwargs))
        return result


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a distributed tensor."""
    return getattr(tensor, LOCAL_PART, tensor)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors with plain memory in nested lists, tuples and dicts."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and _plain(_local(leaf)):
            yield _local(leaf)


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _references_of_its_own() -> int:
    """References to a storage that its Python object holds, besides those of tensors."""
    tensor = torch.empty(1)
    return storage_references(key_of_storage(tensor.untyped_storage())) - 1
