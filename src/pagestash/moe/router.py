"""The router: which experts each token goes to, and with what weight.

T tokens, D the model's width, E experts, K chosen, G groups of experts. Saved for backward: the layer's input
`x_TD`, which the experts save anyway, and the ids, 4·T·K bytes. Scores are recomputed from them, T·E products of
length D, so nothing of size T·E waits. The choice itself is never recomputed, not even where the layer is.
"""

from typing import Any

import torch
from torch import nn

from pagestash.kernels.backend import sum_dtype
from pagestash.kernels.backward import differentiable_once
from pagestash.kernels.moe import choose_experts as kernels
from pagestash.kernels.operator import operator
from pagestash.moe.config import MoEConfig
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

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            weights_TK, aux, ids_TK, counts_E = traced_router(x, self.weight, self.correction, self.config)
            self._count(counts_E)
            return weights_TK, ids_TK, aux
        made: Made | None = None

        def choose() -> tuple[torch.Tensor, torch.Tensor | None]:
            nonlocal made
            ids_TK, counts_E, made = decide(x, self.weight, self.correction, self.config)
            self._count(counts_E)
            return ids_TK, counts_E

        ids_TK, counts_E = once(choose)
        weights_TK, aux = _Weigh.apply(x, self.weight, ids_TK, counts_E, made, self.config)
        return weights_TK, ids_TK, aux

    def _count(self, counts_E: torch.Tensor | None) -> None:
        if self.load is not None and self.training and torch.is_grad_enabled():
            assert counts_E is not None
            self.load += counts_E

    def use_recompute(self, on: bool) -> None:
        """Nothing more than is done anyway: its input and its choices are all that it saves."""

    def update_bias(self, rate: float = 1e-3) -> None:
        """Raise the selection bias of experts with less than the average load, lower that of the others."""
        if self.correction is None or self.load is None:
            raise ValueError("update_bias: the router was made without correction_bias")
        self.correction += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


Made = tuple[torch.Tensor, torch.Tensor]
"""The logits and the weights of a choice."""


@torch.no_grad()
def decide(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, correction_E: torch.Tensor | None, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor | None, Made]:
    """The ids, how many tokens each expert gets (where somebody asks), and what the choice was made of."""
    logits_TE = logits_of(x_TD, weight_ED)
    ids_TK, weights_TK = choose_experts(logits_TE, correction_E, config)
    counts_E = None
    if config.balance_loss or correction_E is not None:
        chosen = ids_TK.flatten().to(torch.int64)
        counts_E = logits_TE.new_zeros(config.experts).scatter_add_(
            0, chosen, logits_TE.new_ones(chosen.shape)
        )
    return ids_TK, counts_E, (logits_TE, weights_TK)


def logits_of(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Float32 [T, E]; products in x's precision, sums in float32."""
    if x_TD.dtype == torch.float64:
        return x_TD @ weight_ED.t().to(x_TD.dtype)
    if x_TD.is_cuda and x_TD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_TD, weight_ED.to(x_TD.dtype).t(), out_dtype=torch.float32)
    return x_TD.float() @ weight_ED.to(x_TD.dtype).float().t()


def choose_experts(
    logits_TE: torch.Tensor, correction_E: torch.Tensor | None, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [T, K], best first, and their weights [T, K]."""
    if config.groups == 1:
        return kernels.choose_experts(logits_TE, config.top_k, scoring_of(config), correction_E)
    scores_TE = torch.sigmoid(logits_TE) if config.score == "sigmoid" else logits_TE
    if correction_E is not None:
        scores_TE = scores_TE + correction_E
    grouped = scores_TE.float().view(-1, config.groups, config.experts // config.groups)
    # DeepSeek-V3: a group is worth the sum of its two best experts.
    worth_TG = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
    best = kernels.topk(worth_TG, config.group_limit).to(torch.int64)
    allowed_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, best, True)
    ids_TK = kernels.topk(torch.where(allowed_TG[:, :, None], grouped, -torch.inf).flatten(1), config.top_k)
    return ids_TK, kernels.weigh(logits_TE, ids_TK, scoring_of(config))


def scoring_of(config: MoEConfig) -> kernels.Scoring:
    return kernels.Scoring(config.score == "sigmoid", config.normalise, config.route_scale)


def auxiliary_losses(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, counts_E: torch.Tensor | None, config: MoEConfig
) -> torch.Tensor:
    """Balance and z loss, times their coefficients; differentiable in the logits."""
    if not ids_TK.shape[0]:  # a rank without tokens: means over nothing would be NaN
        return logits_TE.new_zeros(())
    losses: list[torch.Tensor] = []
    if config.balance_loss:
        assert counts_E is not None
        if config.score == "sigmoid":
            scores_TE = torch.sigmoid(logits_TE)
            shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + kernels.EPSILON)
        else:
            shares_TE = torch.softmax(logits_TE, dim=1)
        taken_E = counts_E * (config.experts / ids_TK.numel())
        losses.append(config.balance_loss * (taken_E * shares_TE.mean(0)).sum())
    if config.z_loss:
        losses.append(config.z_loss * (torch.logsumexp(logits_TE, dim=1) ** 2).mean())
    if not losses:
        return logits_TE.new_zeros(())
    return losses[0] if len(losses) == 1 else losses[0] + losses[1]


def auxiliary_gradient(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, counts_E: torch.Tensor | None, config: MoEConfig
) -> torch.Tensor:
    """That of `auxiliary_losses` [T, E]."""
    tokens, shares_TE = ids_TK.shape[0], torch.softmax(logits_TE, dim=1)
    found = torch.zeros_like(logits_TE)
    if config.z_loss:
        found += (2 * config.z_loss / tokens) * torch.logsumexp(logits_TE, dim=1, keepdim=True) * shares_TE
    if config.balance_loss:
        assert counts_E is not None
        of_share_E = counts_E * (config.balance_loss * config.experts / ids_TK.numel() / tokens)
        slope_TE = shares_TE
        if config.score == "sigmoid":
            scores_TE = torch.sigmoid(logits_TE)
            sums_T1 = scores_TE.sum(1, keepdim=True) + kernels.EPSILON
            shares_TE, slope_TE = scores_TE / sums_T1, scores_TE * (1 - scores_TE) / sums_T1
        found += slope_TE * (of_share_E - (shares_TE * of_share_E).sum(1, keepdim=True))
    return found


class _Weigh(torch.autograd.Function):
    """Saves `x_TD` and the ids; everything in between is recomputed in backward.

    `made` are the logits and weights of the choice; None where an earlier forward made it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
        ids_TK: torch.Tensor,
        counts_E: torch.Tensor | None,
        made: Made | None,
        config: MoEConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if made is None:
            logits_TE = logits_of(x_TD, weight_ED)
            made = logits_TE, kernels.weigh(logits_TE, ids_TK, scoring_of(config))
        logits_TE, weights_TK = made
        aux = auxiliary_losses(logits_TE, ids_TK, counts_E, config)
        ctx.save_for_backward(x_TD, weight_ED, ids_TK, counts_E)
        ctx.config = config
        return weights_TK, aux

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dweights_TK: torch.Tensor, daux: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_ED, ids_TK, counts_E = ctx.saved_tensors
        config, logits_TE = ctx.config, logits_of(x_TD, weight_ED)
        with_losses = bool(config.balance_loss or config.z_loss) and ids_TK.shape[0] > 0
        dtype = logits_TE.dtype if with_losses else x_TD.dtype
        dlogits_TE = kernels.weigh_gradient(logits_TE, ids_TK, dweights_TK, scoring_of(config), dtype)
        if with_losses:
            dlogits_TE = dlogits_TE + daux * auxiliary_gradient(logits_TE, ids_TK, counts_E, config)
        narrow_TE = dlogits_TE.to(x_TD.dtype)
        dx_TD = narrow_TE @ weight_ED.to(x_TD.dtype) if ctx.needs_input_grad[0] else None
        dweight_ED = (narrow_TE.t() @ x_TD).to(weight_ED.dtype) if ctx.needs_input_grad[1] else None
        return dx_TD, dweight_ED, None, None, None, None


# --- for compilers ---

SETTINGS = ("top_k", "score", "normalise", "route_scale", "groups", "group_limit", "balance_loss", "z_loss")


class _Router:
    """The choice and `_Weigh`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
        correction_E: torch.Tensor | None,
        settings: tuple[Any, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = _config(weight_ED, settings)
        ids_TK, counts_E, made = decide(x_TD, weight_ED, correction_E, config)
        return _Weigh.forward(ctx, x_TD, weight_ED, ids_TK, counts_E, made, config)

    @staticmethod
    def backward(ctx: Any, dweights_TK: torch.Tensor, daux: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_ED, ids_TK, *counts = ctx.saved_tensors
        ctx.saved_tensors = x_TD, weight_ED, ids_TK, *(counts or [None])
        ctx.config = _config(weight_ED, ctx.settings)
        return _Weigh.backward(ctx, dweights_TK, daux)


def _config(weight_ED: torch.Tensor, settings: tuple[Any, ...]) -> MoEConfig:
    experts, width = weight_ED.shape
    given: Any = dict(zip(SETTINGS, settings, strict=True))
    return MoEConfig(experts=experts, width=width, expert_width=1, **given)


def _fake(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, correction_E: torch.Tensor | None, *settings: Any
) -> list[torch.Tensor]:
    config = _config(weight_ED, settings)
    wide = sum_dtype(x_TD.dtype)
    weights_TK = x_TD.new_empty(x_TD.shape[0], config.top_k, dtype=wide)
    counted = config.balance_loss or correction_E is not None
    counts = [x_TD.new_empty(config.experts, dtype=wide)] if counted else []
    return [
        weights_TK,
        x_TD.new_empty((), dtype=wide),
        torch.empty_like(weights_TK, dtype=torch.int32),
        *counts,
    ]


_router = operator(
    "router",
    _Router,
    "Tensor x, Tensor weight, Tensor? correction, int top_k, str score, bool normalise, float route_scale, "
    "int groups, int group_limit, float balance_loss, float z_loss",
    _fake,
    keeps=(0, 1),
    results=2,
)


def traced_router(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, correction_E: torch.Tensor | None, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The weights, the auxiliary losses, the ids and, where somebody asks, tokens by expert."""
    settings = [getattr(config, name) for name in SETTINGS]
    weights_TK, aux, ids_TK, *counts_E = _router(x_TD, weight_ED, correction_E, *settings)
    return weights_TK, aux, ids_TK, counts_E[0] if counts_E else None
