"""`Experts`: the routed experts of one rank, run as one fused block."""

from typing import Any

import torch

from pagestash.kernels.moe.route import Routing, route
from pagestash.kernels.moe.rows import ALIGNMENT
from pagestash.moe.config import MoEConfig
from pagestash.moe.local import local_experts, traced_experts
from pagestash.moe.parallel.capacity import HEADROOM, Capacity
from pagestash.moe.parallel.dispatch import Dispatch, Received
from pagestash.moe.parts import ExpertFC1, ExpertFC2, MoEAct, SelfSaving
from pagestash.moe.received import received_experts
from pagestash.moe.saving import BlockOptions, Saving
from pagestash.pages.pool import PagePool
from pagestash.saved.compiled import run_as_it_is
from pagestash.saved.fused import claim, has_rule, needs_backward
from pagestash.saved.received_rows import ReceivedRows
from pagestash.saved.recompute.once import once
from pagestash.saved.region import in_recompute


class Experts(SelfSaving):
    """Runs the routed experts of one rank: the parts it is given, which the layer has as its own modules.

    A rule for this module is one for `expert_fc1` and `moe_act` together, as far as they have none of their own.
    Under `recompute` the first projection is recomputed; rows that came over the wire stay.

    `over_capacity`, a float32 on the device, becomes 1 when more rows arrived than `capacity`; whoever runs
    the step reads it, calls `grow_capacity` and `clear_over_capacity`, and runs the batch again, as with a
    pool's `overflow`. With a `dispatch` the parts hold this rank's experts, and the capacity is the dispatch's.

    Called with ids [T, K] of your own: an id that no expert has (-1, or from the number of experts on) is no
    choice, with any dispatch, and an expert that a token chose twice counts twice. The worst case of a padded
    dispatch is that of distinct ids; `over_capacity` says if others do not fit.
    """

    def __init__(
        self,
        config: MoEConfig,
        parts: tuple[ExpertFC1, MoEAct, ExpertFC2],
        *,
        pool: PagePool | None = None,
        dispatch: Dispatch | None = None,
        account: int = 0,
        interleaved: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.dispatch, self._interleaved = config, dispatch, interleaved
        self.use_pool(pool, account)
        # In a tuple, where they are not registered: they have one name each, in the layer.
        self._parts = parts
        self._last_options: BlockOptions | None = None
        self._rows = Capacity(config.capacity)
        self._most = 0
        self.received_rows: ReceivedRows | None = None
        """What a keeper asks for, and writes to, where `expected_rows` is "auto"."""
        if config.expected_rows == "auto":
            self.received_rows = ReceivedRows()
        self.over_capacity: torch.Tensor
        self.register_buffer("over_capacity", torch.zeros((), device=device), persistent=False)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and self._traceable():
            fc1, _, fc2 = self._parts
            up, down = fc1(), fc2()
            if up.read is None and down.read is None:
                activation, interleaved = self.config.activation, self._interleaved
                return traced_experts(x, weights, up, down, ids, activation, interleaved=interleaved)
        return self._as_it_is(x, weights, ids)

    def _traceable(self) -> bool:
        """Whether its forward is one operator of a compiled graph; else the graph ends before it.

        Not where rows go to other ranks, where a number of rows is bounded, and where a rule names a part.
        """
        bounded = self.dispatch is not None or self._rows.rows is not None
        return not bounded and all(part.plain() for part in (self, *self._parts))

    @run_as_it_is(
        "pagestash: experts are in a graph where rows stay on this rank, nothing bounds their number, and neither "
        "a rule nor FSDP has hooks on experts or a part of them"
    )
    def _as_it_is(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.over_capacity.device != x.device:  # a part of no module that came to this device since
            self.over_capacity = torch.zeros((), device=x.device)
        over = None if self.config.drop else self.over_capacity
        fc1, _, fc2 = self._parts
        up, down = fc1(), fc2()
        recomputed = in_recompute()
        options = self._options_for(recomputed, needs_backward(x, *up.tensors(), *down.tensors()))
        dispatch = self.dispatch
        if dispatch is None:
            routing = once(lambda: self._route(ids, over))
            return local_experts(x, weights, up, down, ids, routing, options)

        def send() -> tuple[Received, int]:
            received = dispatch.send(x, ids, weights, over)
            # A dispatch that moves nothing may hand on the caller's tensor, which waits where it is.
            if recomputed and received.slots is not x:
                claim(fc1, received.slots)
            return received, self._expected(received)

        # The number, too: a keeper may choose another before a replay, which must save the same tensors.
        received, expected = once(send)
        slots = received.slots
        if not recomputed:
            # The experts permute their own rows out of it, and nobody else needs it; a replay does.
            del received.slots
        # In a list, which is emptied: then only the dispatch has it, and lets go of it when it has been sent.
        y = [
            received_experts(
                slots,
                received.weights,
                up,
                down,
                received.ids,
                received.routing,
                options,
                expected_rows=expected,
            )
        ]
        del slots
        return dispatch.collect(y.pop(), received)

    def _expected(self, received: Received) -> int:
        """Rows that this layer expects now."""
        rows = received.expected_rows
        if rows == "auto":
            return 0 if self.received_rows is None else self.received_rows.expected
        return rows

    def _route(self, ids: torch.Tensor, over: torch.Tensor | None) -> Routing:
        choices = ids.numel()
        if choices > self._most:  # setting an attribute of a module costs 3 µs
            self._most = choices
        routing = route(ids, self.config.experts, capacity=self._rows.limit(choices), over=over)
        self._rows.observe(routing.counts)
        return routing

    def _options_for(self, recomputed: bool, needs_backward: bool) -> BlockOptions:
        """The options of a call. Those of the last one serve again, if nothing is different."""
        fc1, act, _ = self._parts
        by_fc1, by_act = self._ruled_by(fc1), self._ruled_by(act)
        activation, half = self.config.activation, self.backward_half
        counted = None if self.dispatch is None else self.received_rows
        last = self._last_options
        if (
            last is not None
            and last.needs_backward is needs_backward
            and last.h.recompute is by_act.recomputes
            and last.half is half
            and last.activation is activation
            and last.counted is counted
            and by_fc1.pool is None
            and by_act.pool is None
        ):
            return last
        # A recomputed forward needs the rows, too: what autograd saves is one for both, and in the same home.
        x_pool = None if recomputed else by_fc1.pool
        options = BlockOptions(
            activation=activation,
            interleaved=self._interleaved,
            x=Saving(module=fc1, pool=x_pool, account=by_fc1.account),
            h=Saving(module=act, pool=by_act.pool, account=by_act.account, recompute=by_act.recomputes),
            needs_backward=needs_backward,
            half=half,
            counted=counted,
        )
        # Not with a pool: that must be free to go when its keeper does.
        self._last_options = options if by_fc1.pool is None and by_act.pool is None else None
        return options

    def __getstate__(self) -> dict[str, Any]:
        """A copy has parts of its own."""
        return super().__getstate__() | {"_last_options": None}

    def _ruled_by(self, part: SelfSaving) -> SelfSaving:
        """The part, where it has a rule of its own; else this module, whose rule then holds for the part."""
        return part if part.pool is not None or part.recomputes or has_rule(part) else self

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
        """Reset `over_capacity` to 0."""
        self.over_capacity.zero_()
