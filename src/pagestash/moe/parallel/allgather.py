"""`AllGather`: every rank sees every token, and takes those that its experts were chosen for.

W ranks of at most M tokens each, of which this one has T; A = W·M tokens of all ranks; K choices a token, D the
model's width, E experts here, R rows of capacity. What moves, for each rank and pass in b-byte elements:
(W - 1)·M·(b·D + 8·K) bytes arrive before the experts and (W - 1)·M·b·D leave after them, whatever was chosen;
backward moves as much the other way.
"""

from typing import Any

import torch

from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.rows import ALIGNMENT
from pagestash.moe.config import MoEConfig
from pagestash.moe.parallel.capacity import HEADROOM, Capacity
from pagestash.moe.parallel.collectives import Ranks, UnderWay
from pagestash.moe.parallel.dispatch import Received
from pagestash.moe.parallel.exchange import Exchange, Gradients, arrive, depart, gradients_of


class AllGather:
    """Expert parallelism by gathering all tokens: static shapes, no host sync, any process group.

        dispatch = AllGather(config, max_tokens=8192)          # on every rank of the default group
        moe = MoE(config, dispatch=dispatch)                   # holds config.experts / ranks experts

    `max_tokens` is the most tokens that any rank brings to one forward, and the same number on every rank;
    ranks with fewer are padded. `config.capacity` bounds the rows that arrive here (all tokens together may
    choose these experts); None makes room for the worst case, ranks × max_tokens × min(top_k, experts here).
    """

    def __init__(self, config: MoEConfig, group: Any = None, *, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
        self.ranks = Ranks(group, config.experts)
        self.experts, self.max_tokens = self.ranks.experts, max_tokens
        self._most = self.ranks.count * max_tokens * min(config.top_k, self.experts)
        self._rows, self._expected = Capacity(config.capacity), config.expected_rows

    @property
    def capacity(self) -> int | None:
        return self._rows.rows

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        if x.shape[0] > self.max_tokens:
            raise ValueError(f"{x.shape[0]} tokens on rank {self.ranks.rank}: max_tokens={self.max_tokens}")
        gather = _Gather(x.shape[0], self.max_tokens, self.ranks)
        x_AD, weights_AK, ids_AK = arrive(gather, depart(gather, x, weights.float(), ids))
        capacity = self._rows.limit(self._most)
        first = self.ranks.rank * self.experts
        routing = route(ids_AK, self.experts, first=first, capacity=capacity, over=over)
        self._rows.observe(routing.counts)
        return Received(
            x_AD, weights_AK, ids_AK - first, routing, expected_rows=self._expected, state=x.shape[0]
        )

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        # Each rank has added up what its own experts made of a token, in the order of the choices; now the ranks.
        scatter = _ReduceScatter(self.ranks)
        departed = depart(scatter, slots)
        del slots
        (sums,) = arrive(scatter, departed)
        return sums[: received.state]

    def grow_capacity(self, *, headroom: float = HEADROOM, alignment: int = ALIGNMENT) -> bool:
        """Make room on every rank for the most rows that any rank wanted. Every rank calls it; it waits."""
        if self._rows.peak is None:
            return False
        wanted = int(self.ranks.maximum(self._rows.peak))
        return self._rows.grow(wanted, self._most, headroom=headroom, alignment=alignment)


def _padded(tensor: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_full((rows - tensor.shape[0], tensor.shape[1]), value)])


class _Gather(Exchange):
    """Tokens [T, D], weights [T, K] and ids [T, K] of every rank, M of each; backward adds gradients up."""

    def __init__(self, tokens: int, most: int, ranks: Ranks) -> None:
        super().__init__()
        self._tokens, self._most, self._ranks = tokens, most, ranks

    def start(self, x_TD: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> list[UnderWay]:
        # A padding token chooses -1, which is nobody's expert.
        chosen = torch.cat([_padded(ids_TK.to(torch.int32), self._most, -1),
                            _padded(weights_TK, self._most).view(torch.int32)], dim=1)  # fmt: skip
        return [self._ranks.start_all_gather(each) for each in (_padded(x_TD, self._most), chosen)]

    def finish(self, x_AD: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids_AK, weights_AK = (half.contiguous() for half in chosen.chunk(2, dim=1))
        return x_AD, weights_AK.view(torch.float32), ids_AK

    def start_back(self, dx_AD: torch.Tensor, dweights_AK: torch.Tensor, _: torch.Tensor) -> list[UnderWay]:
        # A choice has its row on one rank; the others add zeros.
        gradients = (dx_AD, dweights_AK)
        return [self._ranks.start_reduce_scatter(each) for each, asked in zip(gradients, self.needs) if asked]

    def finish_back(self, *arrived: torch.Tensor) -> Gradients:
        return gradients_of(self.needs, [each[: self._tokens] for each in arrived])


class _ReduceScatter(Exchange):
    """The sum over ranks of this rank's tokens: [A, D] to [M, D]."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def start(self, y_AD: torch.Tensor) -> list[UnderWay]:
        return [self._ranks.start_reduce_scatter(y_AD)]

    def start_back(self, dy_MD: torch.Tensor) -> list[UnderWay]:
        return [self._ranks.start_all_gather(dy_MD)]
