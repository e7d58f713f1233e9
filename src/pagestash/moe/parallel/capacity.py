"""How many rows a buffer of static shape holds, how many were wanted, and how it grows."""

import math

import torch

from pagestash.kernels.moe.rows import ALIGNMENT, padded_rows

HEADROOM = 1.1
"""Of a grown capacity over what was wanted: the next batch may want a little more."""


class Capacity:
    """A number of rows that the host knows, and beside it, on the device, the most that were wanted.

    `rows` is None where the worst case always fits. What was wanted is deliberately no module buffer: a step
    that is undone puts buffers back, and this must survive it.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self._peak: torch.Tensor | None = None

    def limit(self, most: int) -> int:
        """The rows to make room for when no more than `most` can come."""
        return most if self.rows is None else min(self.rows, most)

    def observe(self, wanted: torch.Tensor) -> None:
        """Remember the sum of `wanted`, integers on the device, if it is the most so far."""
        if self.rows is None:
            return
        if self._peak is None or self._peak.device != wanted.device:
            with torch.inference_mode(False):  # a later step in ordinary mode writes to it
                self._peak = torch.zeros((), dtype=torch.int64, device=wanted.device)
        torch.maximum(self._peak, wanted.sum(dtype=torch.int64), out=self._peak)

    @property
    def peak(self) -> torch.Tensor | None:
        """The most rows wanted so far, a 0-d int64 on the device; None before the first."""
        return self._peak

    def grow(self, wanted: int, most: int, *, headroom: float = HEADROOM, alignment: int = ALIGNMENT) -> bool:
        """Make room for `wanted` rows, times the headroom, rounded up, but for no more than `most`."""
        if self.rows is None or wanted <= self.rows:
            return False
        self.rows = max(wanted, min(padded_rows(math.ceil(wanted * headroom), alignment), most))
        return True
