"""`MoE`: router, routed experts, shared experts."""

from typing import Any

import torch
from torch import nn

from pagestash.kernels.gather import ALIGNMENT
from pagestash.kernels.route import route
from pagestash.moe.block import BlockOptions, LocalExperts, ReceivedExperts
from pagestash.moe.capacity import HEADROOM, Capacity
from pagestash.moe.config import MoEConfig
from pagestash.moe.dispatch import Dispatch
from pagestash.moe.router import Router
from pagestash.pages.pool import PagePool
from pagestash.saved.region import region


class Experts(nn.Module):
    """The routed experts of one rank: `up` [E, 2n, d] (gate, then linear) and `down` [E, d, n].

    `over_capacity`, a float32 on the device, becomes 1 when more rows arrived than `capacity`; whoever runs
    the step reads it, calls `grow_capacity` and `clear_over_capacity`, and runs the batch again, as with a
    pool's `overflow`. With a `dispatch` E are the experts of this rank, and the capacity is the dispatch's.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        pool: PagePool | None = None,
        dispatch: Dispatch | None = None,
        account: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.pool, self.dispatch, self.account = config, pool, dispatch, account
        self._rows = Capacity(config.capacity)
        self._most = 0
        experts = config.experts if dispatch is None else dispatch.experts
        width, inner = config.width, config.expert_width
        made = {"device": device, "dtype": dtype}
        self.up = nn.Parameter(torch.empty(experts, 2 * inner, width, **made))
        self.down = nn.Parameter(torch.empty(experts, width, inner, **made))
        self.up_bias = nn.Parameter(torch.zeros(experts, 2 * inner, **made)) if config.bias else None
        self.down_bias = nn.Parameter(torch.zeros(experts, width, **made)) if config.bias else None
        self.over_capacity: torch.Tensor
        self.register_buffer("over_capacity", torch.zeros((), device=device), persistent=False)
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=inner**-0.5)

    def use_pool(self, pool: PagePool | None, account: int = 0) -> None:
        """Stash in `pool` from here on, straight from the kernels; None leaves it to autograd."""
        self.pool, self.account = pool, account

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        over = None if self.config.drop else self.over_capacity
        up, down, up_bias, down_bias = self.up, self.down, self.up_bias, self.down_bias
        options = BlockOptions(
            activation=self.config.activation,
            pool=self.pool,
            account=self.account,
            kept=torch.is_grad_enabled()
            and (x.requires_grad or self.up.requires_grad or self.down.requires_grad),
        )
        if self.dispatch is None:
            self._most = max(self._most, ids.numel())
            capacity = self._rows.limit(ids.numel())
            routing = route(ids, self.config.experts, capacity=capacity, over=over)
            self._rows.observe(routing.counts)
            with region(rows=routing.rows, capacity=routing.order.numel()):
                return LocalExperts.apply(x, weights, up, down, up_bias, down_bias, ids, routing, options)
        received = self.dispatch.send(x, ids, weights, over)
        with region(rows=received.offsets[-1:], capacity=received.rows_RD.shape[0]):
            rows = ReceivedExperts.apply(
                received.rows_RD,
                received.weights,
                up,
                down,
                up_bias,
                down_bias,
                received.offsets,
                received.lease,
                options,
            )
        return self.dispatch.collect(rows, received)

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


class SharedExperts(nn.Module):
    """Experts that see every token: one gated projection, saving its input and first projection alone."""

    def __init__(self, config: MoEConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        inner = config.expert_width * config.shared_experts
        self.up = nn.Parameter(torch.empty(1, 2 * inner, config.width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(1, config.width, inner, device=device, dtype=dtype))
        nn.init.normal_(self.up, std=config.width**-0.5)
        nn.init.normal_(self.down, std=inner**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        options = BlockOptions(activation=self.config.activation)
        return ReceivedExperts.apply(x, None, self.up, self.down, None, None, ends, None, options)


class MoE(nn.Module):
    """A Mixture-of-Experts layer that never asks the host how many rows arrived.

        moe = MoE(MoEConfig(width=64, expert_width=32, experts=8, top_k=2))
        y, aux = moe(x)                # x: [..., 64]; aux: the auxiliary losses, add them to yours

    Saved for backward in bf16: the input and the first projection, `2·T·d + 4·T·K·n` bytes, and indices. With
    a `pool` the first projection goes to its pages, valid rows only, and is made again where it had no room.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        pool: PagePool | None = None,
        dispatch: Dispatch | None = None,
        account: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, device=device, dtype=dtype)
        self.experts = Experts(
            config, pool=pool, dispatch=dispatch, account=account, device=device, dtype=dtype
        )
        self.shared = SharedExperts(config, device=device, dtype=dtype) if config.shared_experts else None

    @property
    def over_capacity(self) -> torch.Tensor:
        """A 0-d float32 on the device: 1 once more rows arrived than the capacity, until cleared."""
        return self.experts.over_capacity

    def grow_capacity(self, *, headroom: float = HEADROOM, alignment: int = ALIGNMENT) -> bool:
        """See `Experts.grow_capacity`."""
        return self.experts.grow_capacity(headroom=headroom, alignment=alignment)

    def clear_over_capacity(self) -> None:
        """Take the flag down again."""
        self.experts.clear_over_capacity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[-1] != self.config.width:
            raise ValueError(f"x of shape {tuple(x.shape)}: expected [..., {self.config.width}]")
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            tokens = x.reshape(-1, self.config.width).contiguous()
            weights, ids, aux = self.router(tokens)
            y = self.experts(tokens, weights, ids)
            if self.shared is not None:
                y = y + self.shared(tokens)
        return y.view(x.shape), aux
