"""The storages of a recorded step: which is which, what kind of memory each is, and how long backward holds it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pagestash.profiling.records import Kind
from pagestash.profiling.timeline import Path, Timeline
from pagestash.saved.compiled import hidden
from pagestash.torch_internals import (
    LOCAL_PART,
    StorageWeakRef,
    TorchDispatchMode,
    key_of_storage,
    storage_key,
    tree_leaves,
)

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True, eq=False)
class Alive:
    """Bytes of saved storages that the step allocated and backward still holds."""

    bytes: int = 0


@dataclass(slots=True, eq=False)
class Storage:
    """One storage. The weak reference keeps its address from being reused, so the key stays unique."""

    number: int
    weak: StorageWeakRef
    size: int
    saved: list["Saved"] = field(default_factory=list)
    """Its saved tensors that are still held at the end of forward."""
    made_by: str | None = None
    """The first module that returned it."""
    handles: int = 0
    holders: tuple[str, ...] = ()
    needed_at: int | None = None
    request: int = 0
    freed_at: int | None = None
    beside_bytes: int | None = None
    alive: Alive | None = None
    """Where it counts, from the end of forward on."""

    def valid_bytes(self) -> int:
        """Bytes that backward reads."""
        covered, end = 0, 0
        for first, last in sorted(saved.valid for saved in self.saved):
            covered += max(0, last - max(first, end))
            end = max(end, last)
        return covered


@dataclass(slots=True, eq=False)
class Saved:
    """One saved tensor, while the step runs."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Kind
    nbytes: int
    storage: Storage
    at: int
    valid: tuple[int, int]
    """Byte range of the storage that backward reads."""
    span: tuple[int, int]
    once: bool
    claimed: bool
    has_rows: bool
    block: str
    claim: int
    held: bool = True
    asked: tuple[int, int] | None = None
    done_at: int | None = None


@dataclass(slots=True, eq=False)
class Handle:
    """What autograd holds instead of the tensor. When it is freed, backward is done with the tensor."""

    tensor: torch.Tensor
    saved: Saved
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


class Storages:
    """Every storage that the step has shown, by its key, and which of them the model and the batch own."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.by_key: dict[int, Storage] = {}
        self.weights: dict[int, set[Layout]] = {}
        self.casts: set[int] = set()
        self.buffers = self.keys(model.buffers())
        self.batch = self.keys(plain_tensors(batch))
        self.note_weights(model.parameters())

    def of(self, tensor: torch.Tensor) -> Storage:
        storage = tensor.untyped_storage()
        known = self.by_key.get(key_of_storage(storage))
        if known is None:
            known = Storage(len(self.by_key), StorageWeakRef(storage), storage.nbytes())
            self.by_key[key_of_storage(storage)] = known
        return known

    def keys(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The storages' keys, which stay unique while this object lives."""
        return {self.of(local).weak.key for local in map(local_part, tensors) if is_plain(local)}

    def note_weights(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in map(local_part, parameters):
            if is_plain(parameter):
                key = self.of(parameter).weak.key
                self.weights.setdefault(key, set()).add(_layout(parameter))

    def kind(self, tensor: torch.Tensor) -> Kind:
        key = storage_key(tensor)
        if key in self.weights:
            return "weight" if _layout(tensor) in self.weights[key] else "weight_view"
        if key in self.casts:
            return "weight_cast"
        if key in self.buffers:
            return "buffer"
        return "input" if key in self.batch else "activation"

    def made(self, results: Any, sources: Any) -> None:
        """An operation ran: results computed from weights alone, such as autocast's casts, count as casts."""
        found = list(plain_tensors(sources))
        if not found or not all(self._of_weights(tensor) for tensor in found):
            return
        for tensor in plain_tensors(results):
            key = self.of(tensor).weak.key
            if key not in self.weights:
                self.casts.add(key)

    def _of_weights(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self.weights or key in self.casts


class ObserveCasts(TorchDispatchMode):
    """Observes operations below autograd and autocast, and tells the storages what each made."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._storages.made(result, (args, kwargs))
        return result


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is strided, and has memory."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a distributed tensor."""
    return getattr(tensor, LOCAL_PART, tensor)


def plain_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors with plain memory in nested lists, tuples and dicts."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and is_plain(local_part(leaf)):
            yield local_part(leaf)


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
