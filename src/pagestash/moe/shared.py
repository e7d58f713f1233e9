"""`SharedExperts`: experts that see every token, as one autograd node of two products and the activation.

    x_TD -up-> h_TH -gated activation-> a_TN -down-> y_TD

T tokens, D the model's width, N the experts' together, H = 2N; `up_1HD` and `down_1DN` are stacks of one matrix.
Saved for backward, in bf16: the input, 2·T·D bytes, and the first projection, 4·T·N, which is expendable in pages
as it is for routed experts.
"""

from typing import Any

import torch
from torch import nn

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.gemm.products import TORCH
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activation import SETTINGS, as_settings, from_settings
from pagestash.kernels.moe.ends import missing_bounds
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.kernels.operator import operator
from pagestash.moe.config import MoEConfig
from pagestash.moe.lease import pages_of
from pagestash.moe.parts import SelfSaving
from pagestash.moe.projection import in_dtype_of
from pagestash.moe.saving import BlockOptions, needs
from pagestash.saved.compiled import run_as_it_is
from pagestash.saved.fused import needs_backward
from pagestash.torch_internals import keeps_graph


class SharedExperts(SelfSaving):
    """Experts that see every token: one gated projection, saving its input and first projection alone.

    Its rule is that of both; under `recompute` the input stays and the projection is recomputed.
    """

    def __init__(self, config: MoEConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        inner = config.expert_width * config.shared_experts
        rows = 2 * inner if config.gated else inner
        self.up = nn.Parameter(torch.empty(1, rows, config.width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(1, config.width, inner, device=device, dtype=dtype))
        nn.init.normal_(self.up, std=config.width**-0.5)
        nn.init.normal_(self.down, std=inner**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and self.plain():
            return _traced(x, self.up, self.down, *as_settings(self.config.activation))[0]
        return self._as_it_is(x)

    @run_as_it_is("pagestash: shared experts are in a graph where neither a rule nor FSDP has hooks on them")
    def _as_it_is(self, x: torch.Tensor) -> torch.Tensor:
        options = BlockOptions(
            activation=self.config.activation,
            # The input is left to autograd: it is no kernel's result here, and the router has it, too.
            h=self.saving(),
            needs_backward=needs_backward(x, self.up, self.down),
            half=self.backward_half,
        )
        return SharedBlock.apply(x, self.up, self.down, options)


class SharedBlock(torch.autograd.Function):
    """Tokens [T, D] through an expert that sees all of them; there are no routing weights."""

    inputs = ("x", "up", "down", "options")

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, up_1HD: torch.Tensor, down_1DN: torch.Tensor, options: BlockOptions
    ) -> torch.Tensor:
        up, down = in_dtype_of(x_TD, up_1HD, down_1DN)
        rows = torch.full((1,), x_TD.shape[0], dtype=torch.int32, device=x_TD.device)
        h_TH = x_TD @ up[0].t()
        lease = None
        if options.needs_backward:
            lease = options.h.lease((h_TH.shape[0], h_TH.shape[1]), h_TH.dtype, rows, expendable=True)
        a_TN = gated.forward(h_TH, RowInfo(rows), options.activation, pages_of(lease))
        saved_TH = None if options.h.pool is not None or options.h.recompute else h_TH
        del h_TH
        y_TD = a_TN @ down[0].t()
        options.h.save(saved_TH)
        ctx.save_for_backward(x_TD, up_1HD, down_1DN, rows, saved_TH)
        ctx.lease, ctx.options, ctx.inputs = lease, options, SharedBlock.inputs
        return y_TD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, up_1HD, down_1DN, rows, h_TH = ctx.saved_tensors
        lease, comes_again, recomputed = ctx.lease, keeps_graph(), h_TH is None
        dy_TD = dy_TD.contiguous()
        up, down = in_dtype_of(dy_TD, up_1HD, down_1DN)
        if recomputed and lease is None:
            h_TH = x_TD @ up[0].t()
        elif recomputed:
            # Only where pages are missing: a product of one expert's rows, of which there are none elsewhere.
            bounds = torch.cat([torch.zeros_like(rows), rows])
            h_TH = TORCH.forward(x_TD, up, missing_bounds(bounds, lease.pages))
        # Unless backward will want it again, the gradient of `h` takes the place of `h`.
        dh_TH, a_TN, _ = gated.backward(
            h_TH,
            dy_TD @ down[0],
            RowInfo(rows),
            ctx.options.activation,
            pages_of(lease),
            in_place=recomputed or not (comes_again or ctx.options.functional),
        )
        del h_TH
        if lease is not None and not comes_again:
            lease.close()
        ddown = (dy_TD.t() @ a_TN)[None] if needs(ctx, "down") else None
        del a_TN
        dup = (dh_TH.t() @ x_TD)[None] if needs(ctx, "up") else None
        dx_TD = dh_TH @ up[0] if needs(ctx, "x") else None
        return dx_TD, dup, ddown, None


class _Shared:
    """`SharedBlock`, for compilers."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, up_1HD: torch.Tensor, down_1DN: torch.Tensor, settings: tuple[Any, ...]
    ) -> torch.Tensor:
        options = BlockOptions(activation=from_settings(settings), functional=True)
        return SharedBlock.forward(ctx, x_TD, up_1HD, down_1DN, options)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.options = BlockOptions(activation=from_settings(ctx.settings), functional=True)
        ctx.lease, ctx.inputs = None, SharedBlock.inputs
        return SharedBlock.backward(ctx, dy_TD)


def _fake(x_TD: torch.Tensor, up_1HD: torch.Tensor, *_: Any) -> list[torch.Tensor]:
    tokens = x_TD.shape[0]
    rows, h_TH = x_TD.new_empty(1, dtype=torch.int32), x_TD.new_empty(tokens, up_1HD.shape[1])
    return [x_TD.new_empty(x_TD.shape), rows, h_TH]


_traced = operator(
    "shared_experts", _Shared, f"Tensor x, Tensor up, Tensor down, {SETTINGS}", _fake, keeps=(0, 1, 2)
)
