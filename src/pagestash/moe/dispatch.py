"""What brings tokens to the ranks that hold their experts, and results back."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pagestash.moe.lease import Lease


@dataclass(slots=True)
class Received:
    """Rows that arrived for the experts of this rank, sorted by expert; everything stays on the device."""

    rows_RD: torch.Tensor
    """[capacity, d], differentiable; garbage past the valid rows."""
    weights: torch.Tensor | None
    """Float32 [capacity], differentiable: the weight of each row; None where the sender applies it."""
    offsets: torch.Tensor
    """Int32 [experts here]: where each expert's rows end; the last is the number of valid rows."""
    lease: Lease | None = None
    """Pages that hold the rows already."""
    state: Any = field(default=None, repr=False)
    """What `collect` needs to send results back."""


class Dispatch(Protocol):
    """Expert parallelism, as the layer sees it: `AllGather`, `AllToAll`, or your own."""

    experts: int
    """Experts on this rank."""

    @property
    def capacity(self) -> int | None:
        """Rows that the buffer of received rows holds; None: as many as can arrive."""
        ...

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        """Bring each token [T, d] to its experts `ids` [T, K]; set `over` to 1 beyond capacity.

        Without `over`, rows beyond the capacity are dropped in silence: that was asked for.
        """
        ...

    def collect(self, rows_RD: torch.Tensor, received: Received) -> torch.Tensor:
        """The results of `received.rows_RD`, back at their tokens and summed: [T, d].

        `rows_RD` is used up: its memory may be given back before the results travel.
        """
        ...

    def grow_capacity(self, *, headroom: float, alignment: int) -> bool:
        """Make room for what was wanted; whether anything grew. Every rank calls it; it may wait."""
        ...
