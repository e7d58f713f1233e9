"""`early_free`: the memory of a boundary tensor is freed as soon as its consumers are done.

At a boundary (tokens that were sent, rows that experts have seen, results that were combined) some caller still has
the tensor object in a variable or a record, for its shape or its `grad_fn`, while nobody will read its bytes again.
The object stays and its storage is emptied. Doing that by hand goes wrong in silence: what a node of the graph has
saved, or another tensor looks at, is then garbage. So it is asked first who holds the memory: autograd, views,
other tensors, a collective or a keeper all count as references to the tensor or to its storage. If anything but the
caller does, the tensor is left alone, and goes when the last of them lets go.
"""

import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from pagestash.saved.hooks import SavedTensorHooks
from pagestash.torch_internals import (
    MISSING_FOR_REFERENCES,
    base_of,
    key_of_storage,
    storage_references,
    tensor_references,
    top_saved_tensors_hooks,
)

_PATIENCE = 0.05
"""Seconds to wait for the backend's thread to drop its reference to a collective that is done."""
_IN_USE = "autograd, a view or a collective holds it"


@dataclass(slots=True, eq=False)
class Release:
    """The result of `early_free`: true if the memory was freed."""

    tensor: torch.Tensor | None
    work: Any = None
    reason: str = ""
    """Why the tensor was not freed; empty if it was."""

    @property
    def freed(self) -> bool:
        return self.tensor is None and not self.reason

    def __bool__(self) -> bool:
        return self.freed

    def wait(self) -> "Release":
        """Wait for the collective that reads the tensor, then free it."""
        if self.work is not None:
            self.work.wait()
            self.work = None  # it holds the tensor, too
            _free_soon(self)
        return self


def early_free(tensor: torch.Tensor, *, after: Any = None, sent: bool = False) -> Release:
    """Free the tensor's memory now, if only the caller holds it. Nobody may read it afterwards.

        sent = dispatch(permuted)
        early_free(permuted)                       # freed here, though the caller's frame still has it
        release = early_free(rows, after=work)     # a collective reads it: wait for this instead of the work
        ...
        release.wait()

    Left alone are tensors that a node saved for backward, storage that another tensor shares (as where a group of
    one rank hands back what it was given), parameters, and memory that torch does not own. `after` must be the only
    reference to the collective's handle. `sent`: a collective that is over has read it, and where the backend's
    thread on the host still has to let go, that is waited for. The gradient goes through `grad_fn` as before.
    """
    if torch.compiler.is_compiling():  # a compiler plans memory itself
        return Release(None, reason="it is being compiled")
    if MISSING_FOR_REFERENCES is not None:
        warnings.warn(f"{MISSING_FOR_REFERENCES}: early_free frees nothing", stacklevel=2)
        return Release(None, reason="this version of torch does not count references")
    release = Release(tensor, after)
    if after is None:
        if sent and tensor.device.type == "cpu":
            _free_soon(release)
        else:
            _free(release)
            release.tensor = None
    return release


def _free_soon(release: Release) -> None:
    until = time.perf_counter() + _PATIENCE
    while not _free(release) and release.reason == _IN_USE and time.perf_counter() < until:
        time.sleep(1e-4)
    release.tensor = None


def _free(release: Release) -> bool:
    assert release.tensor is not None
    release.reason = _held(release.tensor)
    if release.reason:
        return False
    release.tensor.untyped_storage().resize_(0)
    release.tensor = None
    return True


def _held(tensor: torch.Tensor) -> str:
    """Who else holds the tensor's memory; empty if nobody does."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return "it is no plain tensor"
    if tensor.is_leaf and tensor.requires_grad:
        return "it is a leaf of the graph"
    hooks = top_saved_tensors_hooks(True)
    if hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavedTensorHooks):
        # They may hold the object that was saved itself; a count cannot tell that from the caller's reference.
        return "saved-tensor hooks of somebody else are active"
    storage = tensor.untyped_storage()
    if not storage.resizable():
        return "its memory is not torch's"
    owners = 2  # the tensor, and `storage`
    if base_of(tensor) is not None:
        # Rows cut from a rounded allocation are a view of a buffer to which nobody else has a reference.
        owners += 1
        if _base_references(tensor) > _FORGOTTEN:
            return "it is a view of a tensor that is in use"
    if tensor_references(tensor) > 1:
        return _IN_USE
    if storage_references(key_of_storage(storage)) > owners:
        return "another tensor shares its memory"
    return ""


def _base_references(view: torch.Tensor) -> int:
    """References to the tensor that `view` is a view of: those of torch, and those of Python."""
    base = base_of(view)
    assert base is not None
    return tensor_references(base) + sys.getrefcount(base)


_FORGOTTEN = _base_references(torch.empty(2)[:1]) if MISSING_FOR_REFERENCES is None else 0
"""`_base_references` if nobody else has the base; versions of torch and Python count differently."""
