"""`once`: decisions that a region under recompute takes in its first forward and never again."""

from collections.abc import Callable
from typing import TypeVar

import torch

from pagestash.saved.compiled import hidden
from pagestash.saved.region import frames

T = TypeVar("T")


@hidden
def once(fn: Callable[[], T]) -> T:
    """Run `fn` where forward runs first; where a region under `recompute` is run again, give its result back.

        weights, ids, aux = once(lambda: self.router(x))    # routed once, however often the layer is run

    For what must not happen twice (a routing decision, rows sent over a wire, a counter) or might come out
    otherwise the second time. What `fn` saves for backward, and what it returns, waits in the home of the region
    around the recomputed one, or of the region `once` is called in if a rule gave that another home. Gradients
    flow through the result as usual. Calls are matched in order: a region must make the same ones each time.
    Results may be tensors, and tuples, lists, dicts and dataclasses of them.

    Outside a region under recompute this is `fn()`.
    """
    # (What is compiled is run again as the same graph, which decides the same.)
    current = () if torch.compiler.is_compiling() else frames()
    for frame in reversed(current):
        if frame.run is not None:
            return frame.run.run_once(fn)
    return fn()
