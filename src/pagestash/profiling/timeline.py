"""The step, cut into segments where the running region changes: in forward by modules, in backward by nodes."""

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import torch

from pagestash.torch_internals import next_sequence_number, sequence_number, spin

Path = tuple[str, ...]
"""The regions that are running, outermost first; the model itself is ""."""
MODEL: Path = ("",)
CYCLES = 2e9
"""Cycles of a GPU's clock per second, roughly."""
LONGEST_LEAD = 1.0
"""Longest head start in seconds; a longer segment keeps the device busy anyway."""


class Clock(Protocol):
    """Marks moments; the seconds between them are read at the end."""

    def mark(self) -> Any: ...

    def between(self, marks: list[Any]) -> list[float]: ...


class NoClock:
    """For a step that is recorded and not timed."""

    def mark(self) -> None:
        return None

    def between(self, marks: list[Any]) -> list[float]:
        return [0.0] * (len(marks) - 1)


class HostClock:
    """The host's clock, for a CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, marks: list[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]


class StepClock:
    """The host's clock around a step that a GPU runs: it begins with an idle device and ends when that is done."""

    def __init__(self) -> None:
        self.launched: list[float] = []
        """Seconds between the marks, when the host had launched what lies between them."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, marks: list[float]) -> list[float]:
        self.launched = [after - before for before, after in pairwise(marks)]
        torch.cuda.synchronize()
        return [*self.launched[:-1], time.perf_counter() - marks[-2]]


class EventClock:
    """CUDA events on the compute stream: the device's time, without a wait of the host.

    Before segment i the device spins for `leads[i]` seconds, which count for no segment. The host has launched the
    segment by then, so that no gap between two launches is counted.
    """

    def __init__(self, leads: Iterable[float] = ()) -> None:
        self._leads = iter(leads)

    def mark(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """The end of a segment, and the beginning of the next."""
        end = self._record()
        lead = next(self._leads, 0.0)
        if not lead:
            return end, end
        spin(int(min(lead, LONGEST_LEAD) * CYCLES))
        return end, self._record()

    def between(self, marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [before[1].elapsed_time(after[0]) / 1e3 for before, after in pairwise(marks)]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Timeline:
    """Segments of one step. Call `switch` at every change of region; consecutive segments of one path merge."""

    def __init__(self, clock: Clock) -> None:
        self.paths: list[Path] = []
        self.turn = 0
        """The first segment of backward."""
        self._clock = clock
        self._marks: list[Any] = []
        self._numbers: list[int] = []
        """Of the first node of each segment in which nodes are created, from segment `_begun` on."""
        self._begun = 0
        self._creates = True

    def switch(self, path: Path) -> None:
        if self.paths and self.paths[-1] == path:
            return
        self._cut(path)
        if self._creates:
            self._numbers.append(next_sequence_number())

    def begin_backward(self, loss: torch.Tensor | None = None) -> None:
        """Forward is over: in backward, a node starts a segment of the regions in which it was created."""
        self.turn = len(self.paths)
        self._begin_backward(MODEL, () if loss is None else (loss,))

    def _begin_backward(self, path: Path, roots: Iterable[torch.Tensor]) -> None:
        self._creates = False
        self._cut(path)
        for node in nodes_of(*roots):
            # Accumulating a gradient counts for the node that computed it.
            if node.name() != "torch::autograd::AccumulateGrad":
                path = self.path_of(node)
                node.register_prehook(lambda grads, path=path: self.switch(path))

    # --- a part of forward that runs again in backward ---

    def begin_replay(self) -> int:
        """It begins now; its first segment."""
        self._numbers, self._begun, self._creates = [next_sequence_number()], len(self.paths), True
        self._cut(self.paths[-1])
        return self.now

    def begin_backward_of(self, results: Iterable[torch.Tensor]) -> int:
        """It is over, and backward of what it returned begins; that one's first segment."""
        self._begin_backward(self.paths[self._begun], results)
        return len(self.paths) - 1

    def end_backward_of(self) -> int:
        """That is over, too; the segment that begins now."""
        self._cut(self.paths[self._begun])
        return self.now

    def finish(self) -> list[float]:
        """The seconds of each segment."""
        return self._clock.between([*self._marks, self._clock.mark()])

    @property
    def now(self) -> int:
        """The index of the running segment."""
        return len(self.paths) - 1

    def path_of(self, node: Any) -> Path:
        """The regions in which a node was created."""
        return self._made_in(sequence_number(node))

    def coming(self, path: Path) -> int:
        """The segment of what runs next, in these regions."""
        return self.now + (path != self.paths[-1])

    def _cut(self, path: Path) -> None:
        self.paths.append(path)
        self._marks.append(self._clock.mark())

    def _made_in(self, number: int) -> Path:
        segment = bisect_right(self._numbers, number) - 1
        return self.paths[self._begun + segment] if segment >= 0 else MODEL


def nodes_of(*roots: torch.Tensor) -> Iterator[Any]:
    """Every node of the graphs of these tensors, once."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
