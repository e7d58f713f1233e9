"""Python's garbage collector, disabled for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the collector, which looks through all that the program holds. No cycle is freed meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For a capture: the collector may free an old graph or a communicator, which would make it fail."""
    gc.collect()
    with collector_paused():
        yield
