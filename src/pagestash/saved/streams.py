"""Streams beside the compute stream, and the events that order them; on a CPU all of it is in order anyway."""

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A stream for host copies. Work runs `after` the compute stream's present, and leaves an event to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used = False

    def after(self, *events: torch.cuda.Event | None) -> AbstractContextManager[None]:
        """Enter it at once. What is inside runs here, behind the current stream's work so far and `events`."""
        if self._stream is None:
            return nullcontext()
        self._used = True
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event that is done when everything put on this stream so far is."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self) -> None:
        """The current stream waits for all of it; a stream not used since then is left alone.

        (A capture may only wait for streams that it forked.)
        """
        if self._used:
            self._used = False
            wait_here(self.mark())


def wait_here(event: torch.cuda.Event | None) -> None:
    """The current stream of the event's device goes on only after `event`; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream(event.device).wait_event(event)


def is_done(event: torch.cuda.Event | None) -> bool:
    """Whether `event` is known to be over; in a capture nothing is."""
    return event is None or (not capturing() and event.query())


def capturing() -> bool:
    """Whether the current stream's work is recorded for a CUDA graph rather than run."""
    # (Not `is_available`, which asks the driver: this is asked for every region.)
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
