"""What dispatches say to each other: the collectives of `torch.distributed`, named, checked, and under way.

W ranks. A collective is *started* on the communication stream of its device, and is *under way* until the compute
stream waits for it, so that what is launched in between runs beside it. All ranks start the same ones in the same
order, and none asks the host for anything that is on the device: a CUDA graph can record them.

Memory belongs to the compute stream. The hand-overs between the two streams, and why each is safe:

- *compute to wire*: the communication stream waits for the compute stream's present. What is sent is complete then,
  and nobody still uses the memory that the result is written to, which compute may have freed a moment before.
- *wire to compute*: `finish` gives the result, after it has told the compute stream to wait for the collective.
- *what was sent, to the allocator*: a collective under way holds what it sends, and lets go of it in `finish`. What
  the allocator makes of that memory is written by the compute stream, behind the event.
- *given up*: if an error ends a step before `finish`, nobody will wait. The allocator is then told that the
  communication stream has used the memory (`record_stream`), and keeps it until that is over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from pagestash.saved.streams import SideStream, wait_here

# torch 2.13 renamed them; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@cache
def communication_stream(device: torch.device) -> SideStream:
    """The stream of all collectives on a device: they share its links, and their order is that of their starts.

    Of high priority: else the few blocks of a collective would start only when the matrix product beside it has
    started all of its own.
    """
    return SideStream(device, priority=-1)


class UnderWay:
    """A collective that was started. `finish` gives its result, behind which compute goes on."""

    def __init__(
        self, what: str, result: torch.Tensor, sent: torch.Tensor, launch: Callable[[bool], Any]
    ) -> None:
        """`launch` gets whether to return at once, with a handle; else the current stream is behind it."""
        self._what, self._result, self._sent = what, result, sent
        self._handle: Any = None
        self._event: torch.cuda.Event | None = None
        self._stream: SideStream | None = None
        if result.device.type == "cuda":
            self._stream = communication_stream(result.device)
            with self._stream.after(), _explained(what):
                launch(False)
            self._event = self._stream.mark()
        else:
            with _explained(what):
                self._handle = launch(True)

    def wait(self) -> None:
        """Make the compute stream (on a CPU the host) wait for it."""
        if self._stream is not None:
            wait_here(self._event)
            self._stream.forget(self._event)
            self._stream = None
        if self._handle is not None:
            with _explained(self._what):
                self._handle.wait()
            self._handle = None

    def finish(self) -> torch.Tensor:
        """The result, once it has been waited for."""
        self.wait()
        result = self._result
        del self._sent, self._result
        return result

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None:
            stream.outlive((self._sent, self._result))


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

    def start_all_gather(self, tensor: torch.Tensor) -> UnderWay:
        """[n, ...] of every rank, one after another: [W·n, ...]."""
        given = tensor.contiguous()
        out = given.new_empty(self.count * given.shape[0], *given.shape[1:])

        def launch(asynchronous: bool) -> Any:
            return _all_gather(out, given, group=self.group, async_op=asynchronous)

        return UnderWay(self._name("all_gather"), out, given, launch)

    def start_reduce_scatter(self, tensor: torch.Tensor) -> UnderWay:
        """The sum over the ranks of this rank's part: [W·n, ...] to [n, ...]."""
        given = tensor.contiguous()
        out = given.new_empty(given.shape[0] // self.count, *given.shape[1:])

        def launch(asynchronous: bool) -> Any:
            return _reduce_scatter(out, given, group=self.group, async_op=asynchronous)

        return UnderWay(self._name("reduce_scatter"), out, given, launch)

    def start_all_to_all(
        self, tensor: torch.Tensor, sent: list[int] | None = None, arriving: list[int] | None = None
    ) -> UnderWay:
        """Part w of `tensor` to rank w; parts are equal, or as long as the lists say."""
        given = tensor.contiguous()
        out = given.new_empty(given.shape[0] if arriving is None else sum(arriving), *given.shape[1:])

        def launch(asynchronous: bool) -> Any:
            return dist.all_to_all_single(out, given, arriving, sent, group=self.group, async_op=asynchronous)

        return UnderWay(self._name("all_to_all"), out, given, launch)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the ranks."""
        out = tensor.clone()
        with _explained(self._name("all_reduce")):
            dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group)
        return out

    def _name(self, what: str) -> str:
        return f"rank {self.rank} of {self.count}: {what}"


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """An error names the rank: the backend's own names a socket."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} of an expert-parallel layer failed. Most likely another rank has raised, left, or not come "
            f"this far; its log says why. ({error})"
        ) from error
