"""`Experts`: the routed experts of one rank, run as one fused block; and `SharedExperts`, which see every token."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pagestash.kernels.moe.permute import ALIGNMENT
from pagestash.kernels.moe.route import Routing, route
from pagestash.moe.arrived import arrived_experts
from pagestash.moe.block import BlockOptions, LocalExperts, Place, SharedBlock
from pagestash.moe.config import MoEConfig
from pagestash.moe.parallel.capacity import HEADROOM, Capacity
from pagestash.moe.parallel.dispatch import Dispatch, Received
from pagestash.moe.parts import ExpertFC1, ExpertFC2, MoEAct, Placed
from pagestash.pages.pool import PagePool
from pagestash.saved.compiled import run_as_it_is
from pagestash.saved.early_free import early_free
from pagestash.saved.fused import claim, named, note_weights
from pagestash.saved.once import once
from pagestash.saved.region import in_recompute, region, running_again


class Experts(Placed):
    """Runs the routed experts of one rank: the parts it is given, which the layer has as its own modules.

    A rule for this module is one for `expert_fc1` and `moe_act` together, as far as they have none of their own.
    Under `recompute` the first projection is made again; rows that came over a wire stay.

    `over_capacity`, a float32 on the device, becomes 1 when more rows arrived than `capacity`; whoever runs
    the step reads it, calls `grow_capacity` and `clear_over_capacity`, and runs the batch again, as with a
    pool's `overflow`. With a `dispatch` the parts hold this rank's experts, and the capacity is the dispatch's.

    Called with ids [T, K] of your own: an id below 0 is no choice, and an expert that a token chose twice counts
    twice. The worst case of a padded dispatch is that of distinct ids; `over_capacity` says if others do not fit.
    """

    def __init__(
        self,
        config: MoEConfig,
        parts: tuple[ExpertFC1, MoEAct, ExpertFC2],
        *,
        pool: PagePool | None = None,
        dispatch: Dispatch | None = None,
        account: int = 0,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.dispatch = config, dispatch
        self.use_pool(pool, account)
        # In a tuple, where they are not registered: they have one name each, in the layer.
        self._parts = parts
        self._rows = Capacity(config.capacity)
        self._most = 0
        self.over_capacity: torch.Tensor
        self.register_buffer("over_capacity", torch.zeros((), device=device), persistent=False)

    @run_as_it_is
    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        over = None if self.config.drop else self.over_capacity
        fc1, act, fc2 = self._parts
        (up, up_bias), (down, down_bias) = fc1(), fc2()
        options = BlockOptions(
            activation=self.config.activation,
            rows=self._place_of_rows(fc1),
            h=self._place_of(act),
            kept=_backward_may_follow(x, up, down),
            half=self.backward_half,
        )
        dispatch = self.dispatch
        if dispatch is None:
            routing = once(lambda: self._route(ids, over))
            with region():
                note_weights(up, up_bias, down, down_bias)
                return LocalExperts.apply(x, weights, up, down, up_bias, down_bias, ids, routing, options)
        arrived: list[torch.Tensor] = []

        def send() -> tuple[Any, ...]:
            got = dispatch.send(x, ids, weights, over)
            arrived.append(got.slots)
            return got.weights, got.ids, got.routing, got.expected_rows, got.state

        def take_slots() -> torch.Tensor:
            if in_recompute():
                claim(fc1, arrived[0])
            return arrived.pop()

        sent = once(send)
        # By themselves: where the layer is run again, they wait in the home of `expert_fc1`.
        received = Received(once(take_slots), *sent)
        y = arrived_experts(
            received.slots,
            received.weights,
            up,
            down,
            up_bias,
            down_bias,
            received.ids,
            received.routing,
            options,
            expected_rows=received.expected_rows,
        )
        # Unless backward needs them. A dispatch that moves nothing may hand on the caller's tensor, and a region
        # that is run again asks for the same slots.
        if received.slots is not x and not in_recompute():
            early_free(received.slots)
        return dispatch.collect(y, received)

    def _route(self, ids: torch.Tensor, over: torch.Tensor | None) -> Routing:
        self._most = max(self._most, ids.numel())
        routing = route(ids, self.config.experts, capacity=self._rows.limit(ids.numel()), over=over)
        self._rows.observe(routing.counts)
        return routing

    def _place_of(self, part: Placed) -> Place:
        """By the part's own rule, where it has one, else by that of this module."""
        own = part.place()
        if own.pool is not None or own.again or named(part):
            return own
        return replace(self.place(), module=part)

    def _place_of_rows(self, fc1: ExpertFC1) -> Place:
        place = self._place_of(fc1)
        # Who runs this again needs the rows, too: what autograd saves is one for both, and in the same home.
        return replace(place, pool=None) if in_recompute() else place

    @property
    def capacity(self) -> int | None:
        """Rows that the experts' buffers hold, read at each forward; None: as many as can arrive."""
        return self._rows.rows if self.dispatch is None else self.dispatch.capacity

    def grow_capacity(self, *, headroom: float = HEADROOM, alignment: int = ALIGNMENT) -> bool:
        """Make room for the most rows that were wanted, times `headroom`, in multiples of `alignment`.

        Whether anything grew: if so, a graph must be captured again. With a dispatch all its ranks must call
        this, and all grow alike. It waits for the device. A layer that drops rows was told to, and stays.
        """
        if self.config.drop:
            return False
        if self.dispatch is not None:
            return self.dispatch.grow_capacity(headroom=headroom, alignment=alignment)
        if self._rows.peak is None:
            return False
        return self._rows.grow(int(self._rows.peak), self._most, headroom=headroom, alignment=alignment)

    def clear_over_capacity(self) -> None:
        """Take the flag down again."""
        self.over_capacity.zero_()


class SharedExperts(Placed):
    """Experts that see every token: one gated projection, saving its input and first projection alone.

    Its home is that of both; under `recompute` the input stays and the projection is made again.
    """

    def __init__(self, config: MoEConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        inner = config.expert_width * config.shared_experts
        self.up = nn.Parameter(torch.empty(1, 2 * inner, config.width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(1, config.width, inner, device=device, dtype=dtype))
        nn.init.normal_(self.up, std=config.width**-0.5)
        nn.init.normal_(self.down, std=inner**-0.5)

    @run_as_it_is
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = BlockOptions(
            activation=self.config.activation,
            # The input is left to autograd: it is no kernel's result here, and the router has it, too.
            h=self.place(),
            kept=_backward_may_follow(x, self.up, self.down),
            half=self.backward_half,
        )
        return SharedBlock.apply(x, self.up, self.down, options)


def _backward_may_follow(*tensors: torch.Tensor) -> bool:
    if running_again():
        return False  # the first forward has put away what backward needs
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
