"""`SortedRows`: rows that another dispatcher has brought here, sorted by expert. Nothing is sent.

R rows of D, E experts here.
"""

from typing import Any

import torch

from pagestash.kernels.moe.route import Routing
from pagestash.moe.config import MoEConfig
from pagestash.moe.parallel.dispatch import Received


class SortedRows:
    """For the dispatchers of Megatron, DeepEP, HybridEP and others, which send rows and results by themselves.

        experts = Experts(config, parts, dispatch=SortedRows(config))     # config.experts: those of this rank
        y_RD = experts(x_RD, weights_R1, counts_E)

    In the place of ids it takes the number of rows of each expert, [E] integers on the device; the host reads none
    of them. The buffer may be larger than all rows together: what is past them is padding, whatever is in it, and
    has results and gradients of 0. If the counts add up to more than R, the dispatcher had no room for some rows:
    the layer's `over_capacity` becomes 1, and rows past R are left out.
    """

    capacity = None
    """As many rows as the buffer that arrives."""

    def __init__(self, config: MoEConfig) -> None:
        self.experts, self._expected = config.experts, config.expected_rows

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        if ids.shape != (self.experts,):
            raise ValueError(
                f"counts of shape {tuple(ids.shape)}: expected the rows of {self.experts} experts"
            )
        counts_E = ids.to(device=x.device, dtype=torch.int32, non_blocking=True)
        wanted_E = counts_E.cumsum(0, dtype=torch.int32)
        if over is not None:
            over.masked_fill_(wanted_E[-1] > x.shape[0], 1.0)
        ends_E = wanted_E.clamp(max=x.shape[0])
        rows_R = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        inverse_R1 = torch.where(rows_R < ends_E[-1], rows_R, -1)[:, None]
        expert_R1 = torch.searchsorted(ends_E, rows_R, right=True, out_int32=True)[:, None]
        bounds = torch.nn.functional.pad(ends_E, (1, 0))
        routing = Routing(counts_E, bounds, rows_R, inverse_R1)
        return Received(x, weights.float().view(-1, 1), expert_R1, routing, expected_rows=self._expected)

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        return slots

    def grow_capacity(self, **_: Any) -> bool:
        """The buffer is the dispatcher's."""
        return False
