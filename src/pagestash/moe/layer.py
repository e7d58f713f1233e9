"""`MoE`: router, routed experts, shared experts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pagestash.kernels.moe.rows import ALIGNMENT
from pagestash.moe.config import MoEConfig
from pagestash.moe.experts import Experts
from pagestash.moe.parallel.capacity import HEADROOM
from pagestash.moe.parallel.dispatch import Dispatch
from pagestash.moe.parallel.overlap import Beside
from pagestash.moe.parts import ExpertFC1, ExpertFC2, MoEAct
from pagestash.moe.router import Router
from pagestash.moe.shared import SharedExperts
from pagestash.pages.pool import PagePool
from pagestash.saved.region import in_recompute


class MoE(nn.Module):
    """A Mixture-of-Experts layer that needs no row count on the host.

        moe = MoE(MoEConfig(width=64, expert_width=32, experts=8, top_k=2))
        y, aux = moe(x)                # x: [..., 64]; aux: the auxiliary losses, add them to yours

    Saved for backward in bf16: the input and the first projection, `2·T·d + 4·T·K·n` bytes, and indices. With
    a `pool` the first projection goes to its pages, valid rows only, and is recomputed where the pool had no room.

    `experts` runs `expert_fc1`, `moe_act` and `expert_fc2` as one block. They are modules so that rules can name
    them, and give what each one's backward needs its own home.
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
        made: Any = {"device": device, "dtype": dtype}
        experts = config.experts if dispatch is None else dispatch.experts
        width, inner = config.width, config.expert_width
        self.router = Router(config, **made)
        wired = dispatch is not None
        self.expert_fc1 = ExpertFC1(
            experts, inner, width, gated=config.gated, bias=config.bias, wired=wired, **made
        )
        self.moe_act = MoEAct()
        self.expert_fc2 = ExpertFC2(experts, width, inner, bias=config.bias, **made)
        parts = (self.expert_fc1, self.moe_act, self.expert_fc2)
        self.experts = Experts(config, parts, pool=pool, dispatch=dispatch, account=account, device=device)
        self.shared_experts = SharedExperts(config, **made) if config.shared_experts else None

    @property
    def over_capacity(self) -> torch.Tensor:
        """A 0-d float32 on the device: 1 once more rows arrived than the capacity, until cleared."""
        return self.experts.over_capacity

    def grow_capacity(self, *, headroom: float = HEADROOM, alignment: int = ALIGNMENT) -> bool:
        """See `Experts.grow_capacity`."""
        return self.experts.grow_capacity(headroom=headroom, alignment=alignment)

    def clear_over_capacity(self) -> None:
        """Reset `over_capacity` to 0."""
        self.experts.clear_over_capacity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[-1] != self.config.width:
            raise ValueError(f"x of shape {tuple(x.shape)}: expected [..., {self.config.width}]")
        device = x.device.type
        without_autocast: AbstractContextManager[Any] = nullcontext()  # `torch.autocast` takes the host 10 µs
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
            without_autocast = torch.autocast(device, enabled=False)
        with without_autocast:
            tokens = x.reshape(-1, self.config.width).contiguous()
            weights, ids, aux = self.router(tokens)
            y = self._through_experts(tokens, weights, ids)
        return y.view(x.shape), aux

    def _through_experts(
        self, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """The routed experts, and the shared ones while the tokens are on their way to other ranks."""
        shared_experts = self.shared_experts
        if shared_experts is None:
            return self.experts(tokens, weights, ids)
        # Under recompute they run afterwards: a replay sends nothing, and must save in the order of forward.
        if self.experts.dispatch is None or torch.compiler.is_compiling() or in_recompute():
            return self.experts(tokens, weights, ids) + shared_experts(tokens)
        shared = Beside(lambda: shared_experts(tokens))
        with shared.waiting():
            y = self.experts(tokens, weights, ids)
        return y + shared.result()
