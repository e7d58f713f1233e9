"""How far memory is from its peak, from one event of a measured step to the next.

Where it is far, copies may take their time: nothing is won by waiting for memory that nobody needs. At a language
model's head, for one, memory may peak; where it does not, forward's last copies can end beside it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from pagestash.saved.offload.plan import Event
from pagestash.torch_internals import LOCAL_PART


class Reading(NamedTuple):
    """Bytes that are allocated now, the most that were since the last reading, and each gradient's."""

    now: int
    peak: int
    gradients: dict[int, int]

    @property
    def beside_gradients(self) -> int:
        """What is allocated now, without gradients."""
        return self.now - sum(self.gradients.values())


def read_memory(
    device: torch.device | None, parameters: Callable[[], Iterable[torch.Tensor]]
) -> Reading | None:
    """A reading of the allocator, whose peak statistics start anew; None on a device that has none."""
    if device is None or device.type != "cuda":
        return None
    gradients = {
        id(parameter): getattr(parameter.grad, LOCAL_PART, parameter.grad).nbytes
        for parameter in parameters()
        if parameter.grad is not None
    }
    now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return Reading(now, peak, gradients)


class _Peak(NamedTuple):
    """The peak between two events, and bounds of what it is beside gradients, were they all there before."""

    whole: int
    at_least: int
    at_most: int


class HeadroomMeter:
    """Reads the memory at every event of a step."""

    def __init__(self, read: Callable[[], Reading | None]) -> None:
        self._read = read
        self.start()

    def start(self) -> None:
        """A new step. Nothing is read before its first event: there may be none."""
        self._first: Reading | None = None
        self._last: tuple[Event, Reading] | None = None
        self._peaks: dict[Event, _Peak] = {}

    def note(self, event: Event) -> None:
        """An event of the step has come: the time since the last one is over."""
        reading = self._read()
        if reading is None:
            return
        if self._last is None:
            self._first = reading
        else:
            before, begun = self._last
            # Of the gradients made in between, a step that has them all makes at least the largest once more.
            made = [size for which, size in reading.gradients.items() if which not in begun.gradients]
            peak = _Peak(
                reading.peak,
                reading.peak - sum(reading.gradients.values()) + max(made, default=0),
                reading.peak - sum(begun.gradients.values()),
            )
            known = self._peaks.get(before, peak)
            self._peaks[before] = _Peak(*map(max, known, peak))
        self._last = event, reading

    def headroom(self) -> dict[Event, int]:
        """After each event, bytes more that would not have raised the step's peak, in this step or in later ones.

        What the step left behind is there from the beginning of the next: gradients, if they are not dropped, and
        whatever else. The time after the last event does not count, in which an optimizer may make its state.
        """
        if not self._peaks or self._first is None or self._last is None:
            return {}
        left = max(0, self._last[1].beside_gradients - self._first.beside_gradients)
        whole = max(peak.whole for peak in self._peaks.values())
        beside = max(peak.at_least for peak in self._peaks.values())
        return {
            event: max(0, min(whole - peak.whole, beside - peak.at_most) - left)
            for event, peak in self._peaks.items()
        }
