"""Python's garbage collector, disabled or with less to do for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEW = 1000
"""Python 3.12 begins with some hundreds of objects put aside, which nobody looks for."""


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
def old_objects_aside() -> Iterator[None]:
    """Whole collections look only at what is made meanwhile: else each takes a second in a large program."""
    if gc.get_freeze_count() > FEW:  # somebody has put objects aside, and must find them there
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For a capture: the collector may free an old graph or a communicator, which would make it fail."""
    gc.collect()
    with collector_paused():
        yield
