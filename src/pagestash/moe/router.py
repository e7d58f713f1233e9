"""The router: which experts each token goes to, and with what weight.

T tokens, D the model's width, E experts, K chosen, G groups of experts. Saved for backward: the layer's input
`x_TD`, which the experts save anyway, and the ids, 4·T·K bytes. Scores are recomputed from them, T·E products of
length D, so nothing of size T·E waits. The choice itself is never recomputed, not even where the layer is.
"""

from typing import Any

import torch
from torch import nn

from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.moe.route import multihot
from pagestash.kernels.moe.topk import topk
from pagestash.moe.config import MoEConfig
from pagestash.saved.compiled import run_as_it_is
from pagestash.saved.recompute.once import once


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
        logits_TE: torch.Tensor | None = None

        def choose() -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal logits_TE
            with torch.no_grad():
                logits_TE = logits_of(x, self.weight)
                ids_TK = choose_experts(logits_TE, self.correction, self.config)
                if self.config.balance_loss or self.correction is not None:
                    counts_E = multihot(ids_TK, ids_TK, self.config.experts)[0].sum(0).to(logits_TE.dtype)
                else:  # nobody reads them
                    counts_E = torch.zeros(self.config.experts, dtype=logits_TE.dtype, device=x.device)
            if self.load is not None and self.training and torch.is_grad_enabled():
                self.load += counts_E
            return ids_TK, counts_E

        ids_TK, counts_E = once(choose)
        weights_TK, aux = _Weigh.apply(x, self.weight, ids_TK, counts_E, logits_TE, self.config)
        return weights_TK, ids_TK, aux

    def use_recompute(self, on: bool) -> None:
        """Nothing more than is done anyway: its input and its choices are all that it saves."""

    def update_bias(self, rate: float = 1e-3) -> None:
        """Raise the selection bias of experts with less than the average load, lower that of the others."""
        if self.correction is None or self.load is None:
            raise ValueError("update_bias: the router was made without correction_bias")
        self.correction += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def logits_of(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Float32 [T, E]; products in x's precision, sums in float32."""
    if x_TD.dtype == torch.float64:
        return x_TD @ weight_ED.t().to(x_TD.dtype)
    if x_TD.is_cuda and x_TD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_TD, weight_ED.to(x_TD.dtype).t(), out_dtype=torch.float32)
    return x_TD.float() @ weight_ED.to(x_TD.dtype).float().t()


def choose_experts(
    logits_TE: torch.Tensor, correction_E: torch.Tensor | None, config: MoEConfig
) -> torch.Tensor:
    """The ids [T, K], best first."""
    scores_TE = logits_TE.float()
    if config.score == "sigmoid":
        scores_TE = torch.sigmoid(scores_TE)
    if correction_E is not None:
        scores_TE = scores_TE + correction_E
    if config.groups > 1:
        grouped = scores_TE.view(-1, config.groups, config.experts // config.groups)
        # DeepSeek-V3: a group is worth the sum of its two best experts.
        worth_TG = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        best = topk(worth_TG, config.group_limit).to(torch.int64)
        allowed_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, best, True)
        scores_TE = torch.where(allowed_TG[:, :, None], grouped, -torch.inf).view_as(scores_TE)
    return topk(scores_TE, config.top_k)


def weigh(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, counts_E: torch.Tensor, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, K] of chosen experts, and the auxiliary losses; both differentiable in the logits."""
    at_TK = ids_TK.to(torch.int64)
    if config.score == "sigmoid":
        weights_TK = torch.sigmoid(logits_TE.gather(1, at_TK))
        if config.normalise:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    elif config.normalise:
        # The softmax over all experts, divided by the chosen ones' sum, is the softmax over the chosen.
        weights_TK = torch.softmax(logits_TE.gather(1, at_TK), dim=1)
    else:
        weights_TK = torch.softmax(logits_TE, dim=1).gather(1, at_TK)
    if config.route_scale != 1.0:
        weights_TK = weights_TK * config.route_scale
    return weights_TK, _auxiliary_losses(logits_TE, ids_TK, counts_E, config)


def _auxiliary_losses(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, counts_E: torch.Tensor, config: MoEConfig
) -> torch.Tensor:
    """Balance and z loss, times their coefficients."""
    if not ids_TK.shape[0]:  # a rank without tokens: means over nothing would be NaN
        return logits_TE.new_zeros(())
    losses: list[torch.Tensor] = []
    if config.balance_loss:
        if config.score == "sigmoid":
            scores_TE = torch.sigmoid(logits_TE)
            shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)
        else:
            shares_TE = torch.softmax(logits_TE, dim=1)
        taken_E = counts_E * (config.experts / ids_TK.numel())
        losses.append(config.balance_loss * (taken_E * shares_TE.mean(0)).sum())
    if config.z_loss:
        losses.append(config.z_loss * (torch.logsumexp(logits_TE, dim=1) ** 2).mean())
    if not losses:
        return logits_TE.new_zeros(())
    return losses[0] if len(losses) == 1 else losses[0] + losses[1]


class _Weigh(torch.autograd.Function):
    """Saves `x_TD` and the ids; everything in between is recomputed in backward.

    `logits_TE` are those that the choice was made by; None where an earlier forward made it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
        ids_TK: torch.Tensor,
        counts_E: torch.Tensor,
        logits_TE: torch.Tensor | None,
        config: MoEConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits_TE is None:
            logits_TE = logits_of(x_TD, weight_ED)
        weights_TK, aux = weigh(logits_TE, ids_TK, counts_E, config)
        ctx.save_for_backward(x_TD, weight_ED, ids_TK, counts_E)
        ctx.config = config
        return weights_TK, aux

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dweights_TK: torch.Tensor, daux: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_ED, ids_TK, counts_E = ctx.saved_tensors
        logits_TE = logits_of(x_TD, weight_ED).requires_grad_()
        with torch.enable_grad():
            weights_TK, aux = weigh(logits_TE, ids_TK, counts_E, ctx.config)
        wanted = [weights_TK] if aux.grad_fn is None else [weights_TK, aux]
        (dlogits_TE,) = torch.autograd.grad(wanted, logits_TE, [dweights_TK, daux][: len(wanted)])
        narrow_TE = dlogits_TE.to(x_TD.dtype)
        dx_TD = narrow_TE @ weight_ED.to(x_TD.dtype) if ctx.needs_input_grad[0] else None
        dweight_ED = (narrow_TE.t() @ x_TD).to(weight_ED.dtype) if ctx.needs_input_grad[1] else None
        return dx_TD, dweight_ED, None, None, None, None
