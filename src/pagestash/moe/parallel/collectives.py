"""What dispatches say to each other: the collectives of `torch.distributed`, named and checked.

W ranks. All of these are launched in the order in which they are called, and none asks the host for anything
that is on the device, so a CUDA graph can record them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from pagestash.torch_internals import MISSING_FOR_REFERENCES, tensor_references

# torch 2.13 renamed them; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PATIENCE = 0.05
"""Seconds to wait for the backend's thread to drop its references to the tensors of a collective that is over."""


class Ranks:
    """A process group as a dispatch sees it: `rank` of `count`, and the experts that live here."""

    def __init__(self, group: Any, experts: int) -> None:
        self.group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the process group given to the dispatch")
        if experts % self.count:
            raise ValueError(f"experts={experts} cannot be shared out evenly over {self.count} ranks")
        self.experts = experts // self.count

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, ...] of every rank, one after another: [W·n, ...]."""
        out = tensor.new_empty(self.count * tensor.shape[0], *tensor.shape[1:])
        given = tensor.contiguous()
        with self._collective("all_gather", out, given):
            _all_gather(out, given, group=self.group)
        return out

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's part: [W·n, ...] to [n, ...]."""
        out = tensor.new_empty(tensor.shape[0] // self.count, *tensor.shape[1:])
        given = tensor.contiguous()
        with self._collective("reduce_scatter", out, given):
            _reduce_scatter(out, given, group=self.group)
        return out

    def all_to_all(
        self, tensor: torch.Tensor, sent: list[int] | None = None, arriving: list[int] | None = None
    ) -> torch.Tensor:
        """Part w of `tensor` to rank w; parts are equal, or as long as the lists say."""
        rows = tensor.shape[0] if arriving is None else sum(arriving)
        out = tensor.new_empty(rows, *tensor.shape[1:])
        given = tensor.contiguous()
        with self._collective("all_to_all", out, given):
            dist.all_to_all_single(out, given, arriving, sent, group=self.group)
        return out

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the ranks."""
        out = tensor.clone()
        with self._collective("all_reduce", out):
            dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group)
        return out

    @contextmanager
    def _collective(self, what: str, *tensors: torch.Tensor) -> Iterator[None]:
        """Afterwards the backend holds no tensor. An error names the rank: the backend's own names a socket."""
        before = _references(tensors)
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.count}: {what} of an expert-parallel layer failed. Most likely another "
                f"rank has raised, left, or not come this far; its log says why. ({error})"
            ) from error
        if before:
            _wait_for_release(tensors, before)


def _references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """References to each tensor; empty on a GPU, where a collective is only launched."""
    if tensors[0].device.type != "cpu" or MISSING_FOR_REFERENCES is not None or torch.compiler.is_compiling():
        return []
    return [tensor_references(tensor) for tensor in tensors]


def _wait_for_release(tensors: Sequence[torch.Tensor], before: list[int]) -> None:
    """Wait until no tensor has more references than before.

    Gloo's thread drops its own a moment after the thread that waited for it goes on. Until then a tensor that
    nobody else holds would stay, and `early_free` would leave it alone.
    """
    until = perf_counter() + _PATIENCE
    while any(now > then for now, then in zip(_references(tensors), before)) and perf_counter() < until:
        sleep(1e-5)
