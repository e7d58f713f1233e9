"""What brings tokens to the ranks that hold their experts, and results back."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from pagestash.kernels.moe.route import Routing


@dataclass(slots=True)
class Received:
    """Slots that came off the wire for the experts of this rank; everything stays on the device."""

    slots: torch.Tensor = field(repr=False)
    """[slots, d], differentiable; where no expert of this rank was chosen, garbage, and so is its gradient.

    The layer deletes the attribute when the experts have it: they permute their own rows out of it.
    """
    weights: torch.Tensor
    """Float32 [slots, choices], differentiable: the weight of each choice."""
    ids: torch.Tensor
    """Int32 [slots, choices]: the experts chosen, counted from this rank's first."""
    routing: Routing
    """The choices sorted by the experts of this rank, as many as there is room for."""
    expected_rows: int | Literal["auto"] = 0
    """Rows that usually arrive; see `MoEConfig.expected_rows`."""
    state: Any = field(default=None, repr=False)
    """What `collect` needs to send results back."""


class Dispatch(Protocol):
    """Expert parallelism, as the layer sees it: `AllGather`, `AllToAll`, or your own."""

    experts: int
    """Experts on this rank."""

    @property
    def capacity(self) -> int | None:
        """Rows that the experts' buffers hold; None: as many as can arrive."""
        ...

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        """Bring each token [T, d] to its experts `ids` [T, K]; set `over` to 1 beyond capacity.

        An id that no expert has is no choice: a dropped token has only such ones.
        Without `over`, rows beyond the capacity are dropped in silence: that was asked for.
        """
        ...

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        """What the experts made of `received.slots`, back at their tokens and summed: [T, d].

        `slots` is the dispatch's alone: its memory is free again as soon as it lets go of it.
        """
        ...

    def grow_capacity(self, *, headroom: float, alignment: int) -> bool:
        """Make room for what was wanted; whether anything grew. Every rank calls it; it may wait."""
        ...
