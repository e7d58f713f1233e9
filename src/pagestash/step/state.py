"""State that an overflowing step must not change: the bytes of tensors, and which tensor a buffer's name refers to.

Tensors are saved as bytes, because an expanded, quantised or inference tensor cannot be written in place, but
its memory can.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pagestash.saved.storage import byte_range
from pagestash.torch_internals import MKLDNN, buffers_of, coo_parts, storage_key, transient_buffers_of


class ProtectedState:
    """Saves tensors at the start of a step and restores them if it overflowed.

    In an eager step `put_back` writes what changed. In a graph `select` does so for device memory, which is all
    that a graph can change. `on_host`: the copies are in host memory, of no use to a graph.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], device: torch.device, *, on_host: bool = False
    ) -> None:
        self._tensors = list(tensors)
        self._storages = _storages(self._tensors)
        found = (view for tensor in self._tensors for view in _bytes_of(tensor))
        self._views = list({(view.data_ptr(), view.nbytes): view for view in found}.values())
        self._shadow = [torch.empty_like(view, device="cpu" if on_host else None) for view in self._views]
        self._on_device = [view.device.type == device.type for view in self._views]
        self._sparse = [tensor for tensor in self._tensors if _is_sparse(tensor)]
        self._versions: list[int] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_for(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether these are the same tensors, with the same storages."""
        theirs = list(tensors)
        return (
            len(theirs) == len(self._tensors)
            and all(a is b for a, b in zip(theirs, self._tensors))
            and _storages(theirs) == self._storages
        )

    def remember(self) -> None:
        """Save the tensors; in a capture the copies are part of the graph, without sparse device tensors."""
        for shadow, view in zip(self._shadow, self._views):
            shadow.copy_(view)
        self._versions = [tensor._version for tensor in self._sparse if not tensor.is_inference()]
        self._copies = [
            (tensor, tensor.detach().clone())
            for tensor in self._sparse
            if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        ]

    def select(self, skip: torch.Tensor) -> None:
        """Restore device memory if `skip` is true on the device; the host does not wait."""
        if self._versions != [tensor._version for tensor in self._sparse if not tensor.is_inference()]:
            raise ValueError(
                "train_step changes a sparse buffer, which a CUDA graph cannot undo; pass graph=False"
            )
        for shadow, view, on_device in zip(self._shadow, self._views, self._on_device):
            if on_device:
                view.copy_(torch.where(skip, shadow, view))

    def put_back(self, *, host_only: bool = False) -> None:
        """Restore what changed; waits for the device, unless `host_only` restores host memory alone."""
        for shadow, view, on_device in zip(self._shadow, self._views, self._on_device):
            if host_only and on_device:
                continue
            if shadow.device != view.device or not torch.equal(shadow, view):
                view.copy_(shadow)
        for tensor, copy in self._copies:
            if not (host_only and tensor.is_cuda) and not _same(tensor, copy):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(copy)


class Buffers:
    """Which tensors the buffers of modules are; a forward may replace one by another tensor."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [(module, _state_of(module)) for module in modules]

    def tensors(self) -> list[torch.Tensor]:
        """All buffers, each once."""
        found = (value for _, names in self._modules for value in names.values() if value is not None)
        return list({id(tensor): tensor for tensor in found}.values())

    def refuse_replaced(self) -> None:
        """Raise if a buffer was replaced: a graph would continue to use the tensor that it was captured with."""
        for module, names in self._modules:
            now = _state_of(module)
            for name in now.keys() | names.keys():
                if now.get(name) is not names.get(name):
                    raise ValueError(
                        f"train_step replaces the buffer {name!r} of {type(module).__name__} by another tensor, "
                        "but a CUDA graph keeps reading the first; write to it in place (buffer.copy_(...)), or "
                        "pass graph=False"
                    )

    def put_back(self) -> None:
        for module, names in self._modules:
            for name in _state_of(module).keys() - names.keys():
                del buffers_of(module)[name]
            buffers_of(module).update(names)


def _state_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's buffers, without the flags and counters of a module with a capacity."""
    passing = transient_buffers_of(module) if hasattr(module, "grow_capacity") else ()
    return {name: buffer for name, buffer in buffers_of(module).items() if name not in passing}


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors with memory that a tensor consists of; of a distributed one, this rank's."""
    return list(_sparse_parts(tensor)) if _is_sparse(tensor) else _inner(tensor)


def _is_sparse(tensor: torch.Tensor) -> bool:
    wraps = hasattr(tensor, "__tensor_flatten__")  # as a jagged one does
    return not wraps and tensor.layout != torch.strided and tensor.layout != MKLDNN


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor consists of: itself, or those that a subclass wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        values = (getattr(tensor, name) for name in names)  # of a DTensor its mesh is one of them
        return [part for value in values if isinstance(value, torch.Tensor) for part in _inner(value)]
    return [tensor] if tensor.layout == torch.strided and tensor.device.type != "meta" else []


def _storages(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [storage_key(part) for tensor in tensors for part in _inner(tensor)]


def _bytes_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory of a tensor's elements, as integer tensors."""
    return [view for part in _inner(tensor) for view in _as_integers(part)]


def _as_integers(tensor: torch.Tensor) -> list[torch.Tensor]:
    first, last = byte_range(tensor)
    if not tensor.numel():
        return []
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), first, (last - first,), (1,))
    return [flat.view(torch.int64) if first % 8 == 0 and (last - first) % 8 == 0 else flat]


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_sparse_parts(left), _sparse_parts(right)))


def _sparse_parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout == torch.sparse_coo:
        return coo_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
