"""`AllGather`: every rank sees every token, and takes those that its experts were chosen for.

W ranks of at most M tokens each, K choices a token, d the model's width, E experts here, R rows of capacity.
What moves, for each rank and pass in b-byte elements: (W - 1)·M·(b·d + 8·K) bytes arrive before the experts
and (W - 1)·M·b·d leave after them, whatever was chosen; backward moves as much the other way.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.rows import ALIGNMENT
from pagestash.moe.config import MoEConfig
from pagestash.moe.parallel.capacity import HEADROOM, Capacity
from pagestash.moe.parallel.collectives import Ranks
from pagestash.moe.parallel.dispatch import Received


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
        x_all, weights_all, ids_all = _Gather.apply(x, weights.float(), ids, self.max_tokens, self.ranks)
        capacity = self._rows.limit(self._most)
        first = self.ranks.rank * self.experts
        routing = route(ids_all, self.experts, first=first, capacity=capacity, over=over)
        self._rows.observe(routing.counts)
        return Received(
            x_all, weights_all, ids_all - first, routing, expected_rows=self._expected, state=x.shape[0]
        )

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        # Each rank has added up what its own experts made of a token, in the order of the choices; now the ranks.
        return _ReduceScatter.apply(slots, self.ranks)[: received.state]

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


class _Gather(torch.autograd.Function):
    """Tokens [T, d], weights [T, K] and ids [T, K] of every rank, M of each; backward adds gradients up.

    One node for both gradients: their collectives then come in the same order on every rank.
    """

    @staticmethod
    def forward(ctx, x, weights, ids, tokens, ranks):
        ctx.ranks, ctx.tokens = ranks, x.shape[0]
        choices = ids.shape[1]
        # A padding token chooses -1, which is nobody's expert.
        chosen = torch.cat([_padded(ids.to(torch.int32), tokens, -1),
                            _padded(weights, tokens).view(torch.int32)], dim=1)  # fmt: skip
        x_all, chosen_all = ranks.all_gather(_padded(x, tokens)), ranks.all_gather(chosen)
        ids_all = chosen_all[:, :choices].contiguous()
        weights_all = chosen_all[:, choices:].contiguous().view(torch.float32)
        ctx.mark_non_differentiable(ids_all)
        return x_all, weights_all, ids_all

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_all, dweights_all, _ids):
        dx = ctx.ranks.reduce_scatter(dx_all)[: ctx.tokens] if ctx.needs_input_grad[0] else None
        # A choice has its row on one rank; the others add zeros.
        dweights = ctx.ranks.reduce_scatter(dweights_all)[: ctx.tokens] if ctx.needs_input_grad[1] else None
        return dx, dweights, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_all, ranks):
        ctx.ranks = ranks
        return ranks.reduce_scatter(x_all)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return ctx.ranks.all_gather(dx), None
