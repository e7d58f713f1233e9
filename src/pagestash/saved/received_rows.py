"""Layers that leave `expected_rows` to a keeper: how many rows they receive, and what waits for each row.

The device writes the rows of every forward to a log, from a kernel that runs anyway; nobody waits for it. What
waits for backward, and for how long, the host knows: it is recorded in the first steps, as events in the order in
which the host meets them.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

SLOTS = 1024
"""Forwards that a log remembers: a power of two."""


class ReceivedRows:
    """The rows that one layer receives, and how many of them it is to expect."""

    def __init__(self) -> None:
        self.expected = 0
        """What a keeper has chosen; a forward reads it."""
        self.recording: RowsRecording | None = None
        """Where the keeper wants events, in the step that runs."""
        self._log: torch.Tensor | None = None

    def log_on(self, device: torch.device) -> torch.Tensor:
        """The log that a kernel writes: int32 [1 + SLOTS], the number of forwards, and rows in a ring.

        It is deliberately no buffer of the module: a step that is undone puts buffers back.
        """
        if self._log is None or self._log.device != device:
            with torch.inference_mode(False):  # a later step in ordinary mode writes to it
                self._log = torch.zeros(1 + SLOTS, dtype=torch.int32, device=device)
        return self._log

    @property
    def log(self) -> torch.Tensor | None:
        """The log; None before the first forward."""
        return self._log

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a layer counts rows of its own."""
        return ReceivedRows, ()


class WaitingRows(NamedTuple):
    """What waits from one forward of a layer to its backward."""

    layer: ReceivedRows
    call: int
    """How many forwards of the layer came before it in the step."""
    row_bytes: tuple[int, ...]
    """Of each tensor with a row for every row received that a stash rule holds for."""
    head_bytes: int
    """Of all of them, for an expected row: without what a rule's `fraction` offloads."""
    gradient_bytes: int
    """Of the gradients that the layer's first backward leaves behind."""


@dataclass(slots=True)
class RowsRecording:
    """One step: what waits, and the order in which it begins and ends to wait."""

    waiting: list[WaitingRows] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    """Index into `waiting`, and +1 for its forward or -1 for its backward."""

    def begin(
        self, layer: ReceivedRows, row_bytes: tuple[int, ...], head_bytes: int, gradient_bytes: int
    ) -> "Ending":
        call = sum(other.layer is layer for other in self.waiting)
        self.waiting.append(WaitingRows(layer, call, row_bytes, head_bytes, gradient_bytes))
        self.events.append((len(self.waiting) - 1, 1))
        return Ending(self, len(self.waiting) - 1)


@dataclass(frozen=True, slots=True)
class Ending:
    """For the backward of a recorded forward."""

    recording: RowsRecording
    number: int

    def tell(self) -> None:
        self.recording.events.append((self.number, -1))


@dataclass(frozen=True, slots=True)
class ExpectedRowsStats:
    """What a keeper has chosen for layers with `expected_rows="auto"`."""

    rows: int
    head_bytes: int
    """Of the expected rows of all layers that wait at one time."""
    pool_bytes: int
    rerun_probability: float
    """The most that a step should overflow the pool with."""
    changes: int
    """How often the number was changed since the first."""


class RowsChoice(Protocol):
    """Who chooses expected rows, as those that run steps see it. All calls come between steps."""

    leave: bool
    """Whether a rule offloads expected rows: after a change, an eager step must show which leave when."""

    def read(self) -> None:
        """Start to copy the counts of received rows to the host."""
        ...

    def decide(self) -> bool:
        """Whether layers should expect another number, by what was read."""
        ...

    def adopt(self) -> None:
        """Let them expect it. No graph that was captured before may run after this: the pool moves."""
        ...


EVERY = 128
FIRST = 8
READ_LATER = 2
"""Steps from the start of a copy to its use: by then it has arrived, and the host waits for nothing."""


def reads_after(steps: int) -> bool:
    """Whether to `read` after so many steps: often at first, then every `EVERY`."""
    return steps % EVERY == 0 if steps >= EVERY else steps >= FIRST and steps & (steps - 1) == 0


def decides_after(steps: int) -> bool:
    """Whether to `decide` after so many steps. It is the same on all ranks, whatever has arrived when."""
    return steps > READ_LATER and reads_after(steps - READ_LATER)
