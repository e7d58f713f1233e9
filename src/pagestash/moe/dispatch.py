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
    """Expert parallelism, as the layer sees it."""

    experts: int
    """Experts on this rank."""

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        """Bring each token [T, d] to its experts `ids` [T, K]; set `over` to 1 beyond capacity."""
        ...

    def collect(self, rows_RD: torch.Tensor, received: Received) -> torch.Tensor:
        """The results of `received.rows_RD`, back at their tokens and summed: [T, d]."""
        ...
