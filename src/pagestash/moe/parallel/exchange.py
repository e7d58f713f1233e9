"""An exchange with other ranks as two nodes of the graph: one starts it, the other waits for it.

    forward     depart: start collectives ── compute beside them ── arrive: wait
    backward    depart: wait ── compute beside them ── arrive: start those of the gradients

What is under way is in no tensor that anybody has: between the two nodes the graph has an empty one. So nothing can
read a result before it is there, neither the caller nor autograd.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pagestash.moe.parallel.collectives import UnderWay
from pagestash.moe.parallel.overlap import pause

Gradients = tuple[torch.Tensor | None, ...]


class Exchange:
    """The collectives of one exchange, forward and backward. It saves no activation."""

    def __init__(self) -> None:
        self.needs: tuple[bool, ...] = ()
        """Which of the departing tensors require a gradient; known when they have departed."""
        self.under_way: list[UnderWay] = []
        self.under_way_back: list[UnderWay] = []

    def start(self, *departing: Any) -> list[UnderWay]:
        """Start what forward sends."""
        raise NotImplementedError

    def finish(self, *arrived: Any) -> tuple[torch.Tensor, ...]:
        """What forward makes of the results."""
        return arrived

    def start_back(self, *gradients: Any) -> list[UnderWay]:
        """Start what backward sends of the gradients of what `finish` gave."""
        raise NotImplementedError

    def finish_back(self, *arrived: Any) -> Gradients:
        """The gradients of what departed."""
        return arrived


def gradients_of(needs: Sequence[bool], arrived: Sequence[torch.Tensor]) -> Gradients:
    """A gradient for each departed tensor that needs one, in order; None for the others."""
    each = iter(arrived)
    return tuple(next(each) if needed else None for needed in needs)


def depart(exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
    """Start the exchange. The result is for `arrive`; nothing of `tensors` is held once that is over."""
    return _Depart.apply(exchange, *tensors)


def arrive(exchange: Exchange, departed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Wait for what departed. Before that the other half of a pair runs, if there is one (see `overlap`)."""
    pause("forward")  # (here, not inside of the node, where no graph would be made)
    return _Arrive.apply(exchange, departed)


def _finished(under_way: list[UnderWay]) -> list[torch.Tensor]:
    results = [each.finish() for each in under_way]
    under_way.clear()
    return results


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.exchange, exchange.needs = exchange, ctx.needs_input_grad[1:]
        exchange.under_way = exchange.start(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Gradients:
        pause("backward")
        return None, *ctx.exchange.finish_back(*_finished(ctx.exchange.under_way_back))


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, departed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        results = exchange.finish(*_finished(exchange.under_way))
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        ctx.exchange.under_way_back = ctx.exchange.start_back(*gradients)
        return None, gradients[0].new_empty(0)
