"""`once`: what a region under recompute runs in its first forward, and does not repeat in a replay."""

from collections.abc import Callable
from typing import TypeVar

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.region import frames

T = TypeVar("T")


@hidden
def once(fn: Callable[[], T]) -> T:
    """Run `fn` in the first forward only; when a region under `recompute` is replayed, return the same result.

        weights, ids, aux = once(lambda: self.router(x))    # routed once, however often the layer runs

    Use it for what must not happen twice (a routing decision, an all-to-all, a counter) or might give another
    result the second time. What `fn` saves for backward, and its result, go to the home of the region around the
    recomputed one, or to that of the region `once` is called in if a rule gives that another home. Gradients flow
    through the result as usual. Calls are matched in order: a region must make the same calls each time. Results
    may be tensors, and tuples, lists, dicts and dataclasses of them.

    Outside a region under recompute this is `fn()`.
    """
    # (A compiled module is replayed as the same graph, which decides the same. Its tracer cannot read a context.)
    if torch.compiler.is_compiling():
        return fn()
    current = frames()
    for frame in reversed(current):
        if frame.run is not None:
            return frame.run.run_once(fn)
    return current[-1].owner.run_once(fn) if current else fn()
