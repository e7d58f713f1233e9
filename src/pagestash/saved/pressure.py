"""How far memory is from its peak, from one event of a measured step to the next.

Where it is far, copies may take their time: nothing is won by waiting for memory that nobody needs. At a language
model's head, for one, memory may peak; where it does not, forward's last copies can end beside it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from pagestash.saved.order import Event


class Reading(NamedTuple):
    """Bytes that are allocated now, the most that were since the last reading, and those of gradients."""

    now: int
    peak: int
    gradients: int


def read_memory(device: torch.device | None, parameters: Iterable[torch.Tensor]) -> Reading | None:
    """A reading of the allocator, whose peak statistics start anew; None on a device that has none."""
    if device is None or device.type != "cuda":
        return None
    gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    reading = Reading(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device), gradients)
    torch.cuda.reset_peak_memory_stats(device)
    return reading


class Pressure:
    """Reads the memory at every event of a step."""

    def __init__(self, read: Callable[[], Reading | None]) -> None:
        self._read = read
        self._first: Reading | None = None
        self._last: tuple[Event, Reading] | None = None
        self._after: dict[Event, Reading] = {}

    def start(self) -> None:
        """A new step. Nothing is read before its first event: there may be none."""
        self._first, self._last, self._after = None, None, {}

    def note(self, event: Event) -> None:
        """An event of the step has come: the time since the last one is over."""
        reading = self._read()
        if reading is None:
            return
        if self._last is None:
            self._first = reading
        else:
            before, begun = self._last
            known = self._after.get(before)
            peak = max(reading.peak, 0 if known is None else known.peak)
            self._after[before] = Reading(begun.now, peak, begun.gradients)
        self._last = event, reading

    def slack(self) -> dict[Event, int]:
        """After each event, bytes more that would not have raised the step's peak, in this step and in later ones.

        What the step left behind is there from the beginning of the next: gradients, if they are not dropped, and
        whatever else. The time after the last event does not count, in which an optimizer may make its state.
        """
        if not self._after or self._first is None:
            return {}
        last = self._read()
        assert last is not None
        left = max(0, (last.now - last.gradients) - (self._first.now - self._first.gradients))
        most = max(reading.peak for reading in self._after.values())
        most_beside = max(reading.peak - reading.gradients for reading in self._after.values())
        return {
            event: max(0, min(most - peak, most_beside - (peak - gradients)) - left)
            for event, (_, peak, gradients) in self._after.items()
        }
