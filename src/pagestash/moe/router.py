"""The router: which experts each token goes to, and with what weight.

T tokens, E experts, K chosen. Saved for backward: the layer input, which the experts save anyway, and the
ids. Scores are made again from them, T·E products of length d, so nothing of size T·E waits; the choice
itself is never made again, also where the layer is run again to make what it saved.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from pagestash.kernels.moe.route import multihot
from pagestash.kernels.moe.topk import topk
from pagestash.moe.config import MoEConfig
from pagestash.saved.compiled import run_as_it_is
from pagestash.saved.once import once


class Router(nn.Module):
    """Softmax or sigmoid scores and the top K of them, by a `MoEConfig`.

    `weights, ids, aux = router(x)`: float32 [T, K], int32 [T, K], and the auxiliary losses times their
    coefficients, to be added to the model's loss.
    """

    def __init__(self, config: MoEConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.width, device=device, dtype=dtype))
        # float32 whatever the model's dtype: a step of update_bias is below bf16's resolution.
        bias = torch.zeros(config.experts, device=device) if config.correction_bias else None
        load = torch.zeros(config.experts, device=device) if config.correction_bias else None
        self.correction: torch.Tensor | None
        self.load: torch.Tensor | None
        self.register_buffer("correction", bias)
        self.register_buffer("load", load, persistent=False)
        nn.init.normal_(self.weight, std=config.width**-0.5)

    @run_as_it_is
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits: torch.Tensor | None = None

        def choose() -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal logits
            with torch.no_grad():
                logits = logits_of(x, self.weight)
                ids = choose_experts(logits, self.correction, self.config)
                counts = torch.zeros(self.config.experts, dtype=logits.dtype, device=x.device)
                if self.config.balance_loss or self.correction is not None:
                    counts = multihot(ids, ids, self.config.experts)[0].sum(0).to(logits.dtype)
            if self.load is not None and self.training and torch.is_grad_enabled():
                self.load += counts
            return ids, counts

        ids, counts = once(choose)
        weights, aux = _Weigh.apply(x, self.weight, ids, counts, logits, self.config)
        return weights, ids, aux

    def use_recompute(self, again: bool) -> None:
        """Nothing more than is done anyway: its input and its choices are all that it saves."""

    def update_bias(self, rate: float = 1e-3) -> None:
        """Raise the selection bias of experts with less than the average load, lower that of the others."""
        if self.correction is None or self.load is None:
            raise ValueError("update_bias: the router was made without correction_bias")
        self.correction += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def logits_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 [T, E]; products in x's precision, sums in float32."""
    if x.dtype == torch.float64:
        return x @ weight.t().to(x.dtype)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.to(x.dtype).t(), out_dtype=torch.float32)
    return x.float() @ weight.to(x.dtype).float().t()


def choose_experts(logits: torch.Tensor, correction: torch.Tensor | None, config: MoEConfig) -> torch.Tensor:
    """The ids [T, K], best first."""
    scores = logits.float()
    if config.score == "sigmoid":
        scores = torch.sigmoid(scores)
    if correction is not None:
        scores = scores + correction
    if config.groups > 1:
        grouped = scores.view(-1, config.groups, config.experts // config.groups)
        # DeepSeek-V3: a group is worth the sum of its two best experts.
        worth = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        best = topk(worth, config.group_limit).to(torch.int64)
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        scores = torch.where(allowed[:, :, None], grouped, -torch.inf).view_as(scores)
    return topk(scores, config.top_k)


def weigh(
    logits: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, K] of chosen experts, and the auxiliary losses; both differentiable in the logits."""
    at = ids.to(torch.int64)
    if config.score == "sigmoid":
        weights = torch.sigmoid(logits.gather(1, at))
        if config.normalise:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    elif config.normalise:
        # The softmax over all experts, divided by the chosen ones' sum, is the softmax over the chosen.
        weights = torch.softmax(logits.gather(1, at), dim=1)
    else:
        weights = torch.softmax(logits, dim=1).gather(1, at)
    aux = logits.new_zeros(())
    if not ids.shape[0]:  # a rank without tokens: means over nothing would be NaN
        return weights * config.route_scale, aux
    if config.balance_loss:
        shares = torch.softmax(logits, dim=1)
        if config.score == "sigmoid":
            shares = torch.sigmoid(logits)
            shares = shares / (shares.sum(1, keepdim=True) + 1e-20)
        taken = counts * (config.experts / ids.numel())
        aux = aux + config.balance_loss * (taken * shares.mean(0)).sum()
    if config.z_loss:
        aux = aux + config.z_loss * (torch.logsumexp(logits, dim=1) ** 2).mean()
    return weights * config.route_scale, aux


class _Weigh(torch.autograd.Function):
    """Keeps x and the ids; everything in between is made again for backward.

    `logits` are those that the choice was made by; None where it was made before.
    """

    @staticmethod
    def forward(ctx, x, weight, ids, counts, logits, config):
        if logits is None:
            logits = logits_of(x, weight)
        weights, aux = weigh(logits, ids, counts, config)
        ctx.save_for_backward(x, weight, ids, counts)
        ctx.config = config
        return weights, aux

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights, daux):
        x, weight, ids, counts = ctx.saved_tensors
        logits = logits_of(x, weight).requires_grad_()
        with torch.enable_grad():
            weights, aux = weigh(logits, ids, counts, ctx.config)
        wanted = [weights] if aux.grad_fn is None else [weights, aux]
        (dlogits,) = torch.autograd.grad(wanted, logits, [dweights, daux][: len(wanted)])
        narrow = dlogits.to(x.dtype)
        dx = narrow @ weight.to(x.dtype) if ctx.needs_input_grad[0] else None
        dweight = (narrow.t() @ x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None, None, None
