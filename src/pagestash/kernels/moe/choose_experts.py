"""A router's kernels: the best experts of each token with their weights, and the gradient of the logits.

T tokens, E experts, K chosen. From logits l [T, E], in float32:

| score | weights of the chosen | normalised |
| --- | --- | --- |
| softmax | their softmax over all experts | their softmax over the chosen |
| sigmoid | σ(l) | σ(l) / Σ σ over the chosen |

times `scale`. The best are those of the largest l, or of σ(l), plus `correction` [E] where there is one, ties to
the lower id. Which experts are best carries no gradient.

What moves: the logits once, and K ids and weights a token; backward as much, and the gradient.
"""

from typing import Any, NamedTuple

import torch

from pagestash.kernels.backend import Backend, cdiv, choose, launch, power_of_two, tl, triton

ELEMENTS = 2048
"""Of a tile of tokens × experts."""
LOWEST = torch.finfo(torch.float32).min
"""What -inf and NaN count as: still better than an expert that was already taken."""
EPSILON = 1e-20
"""Added to the sum that sigmoids are divided by (DeepSeek-V3)."""


class Scoring(NamedTuple):
    """How a token's weights come of its logits; see the top of the file."""

    sigmoid: bool = False
    normalise: bool = True
    scale: float = 1.0


def choose_experts(
    logits_TE: torch.Tensor,
    top_k: int,
    scoring: Scoring,
    correction_E: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 [T, K], best first, and their weights [T, K]."""
    if not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(f"k={top_k}: expected 1 to {logits_TE.shape[1]}, the number of experts")
    if _backend(logits_TE, backend) == "torch":
        scores_TE = torch.sigmoid(logits_TE) if scoring.sigmoid else logits_TE
        if correction_E is not None:
            scores_TE = scores_TE + correction_E
        ids_TK = topk_reference(scores_TE.float(), top_k)
        return ids_TK, weigh_reference(logits_TE, ids_TK, scoring)
    ids_TK = torch.empty(logits_TE.shape[0], top_k, dtype=torch.int32, device=logits_TE.device)
    return ids_TK, _forward(logits_TE, ids_TK, scoring, correction_E, choosing=True)


def topk(scores_TE: torch.Tensor, k: int, *, backend: str = "auto") -> torch.Tensor:
    """Int32 [T, k]: the columns of the k largest scores of each row, best first, ties to the lower one."""
    return choose_experts(scores_TE, k, Scoring(), backend=backend)[0]


def weigh(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, scoring: Scoring, *, backend: str = "auto"
) -> torch.Tensor:
    """The weights of experts that were chosen before."""
    if _backend(logits_TE, backend) == "torch":
        return weigh_reference(logits_TE, ids_TK, scoring)
    return _forward(logits_TE, ids_TK.contiguous(), scoring, None, choosing=False)


def weigh_gradient(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    dweights_TK: torch.Tensor,
    scoring: Scoring,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """The gradient of the logits, in `dtype`, from that of the weights."""
    if _backend(logits_TE, backend) == "torch":
        return weigh_gradient_reference(logits_TE, ids_TK, dweights_TK, scoring).to(dtype)
    dlogits_TE = torch.empty(logits_TE.shape, dtype=dtype, device=logits_TE.device)
    operands = (logits_TE, ids_TK.contiguous(), dweights_TK.contiguous(), dlogits_TE)
    _launch(_backward_kernel, logits_TE, ids_TK, operands, scoring)
    return dlogits_TE


# --- what: the torch reference ------------------------------------------------------------------------------


def topk_reference(scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    """(`torch.topk` promises no order among equal scores.)"""
    clean_TE = torch.where(scores_TE > LOWEST, scores_TE, LOWEST)
    return (
        torch.sort(clean_TE, dim=1, descending=True, stable=True).indices[:, :k].to(torch.int32).contiguous()
    )


def weigh_reference(logits_TE: torch.Tensor, ids_TK: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Differentiable in the logits."""
    at_TK = ids_TK.to(torch.int64)
    if scoring.sigmoid:
        weights_TK = torch.sigmoid(logits_TE.gather(1, at_TK))
        if scoring.normalise:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + EPSILON)
    elif scoring.normalise:
        # The softmax over all experts, divided by the chosen ones' sum, is the softmax over the chosen.
        weights_TK = torch.softmax(logits_TE.gather(1, at_TK), dim=1)
    else:
        weights_TK = torch.softmax(logits_TE, dim=1).gather(1, at_TK)
    return weights_TK * scoring.scale if scoring.scale != 1.0 else weights_TK


def weigh_gradient_reference(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, dweights_TK: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """(Not by autograd: inside an operator of a compiled graph there is none.)"""
    at_TK, dshares_TK = ids_TK.to(torch.int64), dweights_TK * scoring.scale
    zeros_TE = torch.zeros_like(logits_TE)
    if not (scoring.sigmoid or scoring.normalise):
        shares_TE = torch.softmax(logits_TE, dim=1)
        dshares_TE = zeros_TE.scatter_add(1, at_TK, dshares_TK.to(zeros_TE.dtype))
        return shares_TE * (dshares_TE - (shares_TE * dshares_TE).sum(1, keepdim=True))
    chosen_TK = logits_TE.gather(1, at_TK)
    if scoring.sigmoid:
        scores_TK = torch.sigmoid(chosen_TK)
        dscores_TK = dshares_TK
        if scoring.normalise:
            sums_T1 = scores_TK.sum(1, keepdim=True) + EPSILON
            mean_T1 = (scores_TK * dshares_TK).sum(1, keepdim=True) / sums_T1
            dscores_TK = (dshares_TK - mean_T1) / sums_T1
        dchosen_TK = dscores_TK * scores_TK * (1 - scores_TK)
    else:
        shares_TK = torch.softmax(chosen_TK, dim=1)
        dchosen_TK = shares_TK * (dshares_TK - (shares_TK * dshares_TK).sum(1, keepdim=True))
    return zeros_TE.scatter_add(1, at_TK, dchosen_TK.to(zeros_TE.dtype))  # (softmax widens under autocast)


# --- how: the Triton kernels --------------------------------------------------------------------------------


def _backend(logits_TE: torch.Tensor, backend: str) -> Backend:
    """Float64 is for the reference."""
    return "torch" if logits_TE.dtype != torch.float32 else choose(logits_TE.device, backend)


def _forward(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    scoring: Scoring,
    correction_E: torch.Tensor | None,
    *,
    choosing: bool,
) -> torch.Tensor:
    weights_TK = torch.empty(ids_TK.shape, dtype=torch.float32, device=logits_TE.device)
    operands = (logits_TE, logits_TE if correction_E is None else correction_E, ids_TK, weights_TK)
    more = {"CHOOSING": choosing, "CORRECTED": correction_E is not None, "LOWEST": LOWEST}
    _launch(_forward_kernel, logits_TE, ids_TK, operands, scoring, **more)
    return weights_TK


def _launch(
    kernel: Any,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    scoring: Scoring,
    **more: Any,
) -> None:
    if not logits_TE.is_contiguous():
        raise ValueError(f"logits of strides {logits_TE.stride()}: expected contiguous [tokens, experts]")
    tokens, experts = logits_TE.shape
    block = power_of_two(experts)
    together = max(1, ELEMENTS // block)
    if not tokens:
        return
    launch(
        kernel,
        (cdiv(tokens, together),),
        logits_TE.device,
        *operands,
        tokens,
        experts,
        SIGMOID=scoring.sigmoid,
        NORMALISE=scoring.normalise,
        SCALE=scoring.scale,
        EPSILON=EPSILON,
        K=ids_TK.shape[1],
        CHOICES=power_of_two(ids_TK.shape[1]),
        TOKENS=together,
        BLOCK=block,
        **more,
    )


@triton.jit
def _softmax(value, inside):
    """Of each row, over what is inside."""
    value = tl.where(inside, value, float("-inf"))
    power = tl.where(inside, tl.exp(value - tl.max(value, axis=1)[:, None]), 0.0)
    return power / tl.sum(power, axis=1)[:, None]


@triton.jit
def _forward_kernel(
    logits,
    correction,
    ids,
    weights,
    tokens,
    experts,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOOSING: tl.constexpr,
    CORRECTED: tl.constexpr,
    LOWEST: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOICES)
    row = token.to(tl.int64)[:, None]
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    taken = (token < tokens)[:, None] & (choice < K)[None, :]
    logit = tl.load(logits + row * experts + column[None, :], mask=inside, other=0.0)
    if CHOOSING:
        score = logit
        if SIGMOID:
            score = tl.sigmoid(logit)
        if CORRECTED:
            score += tl.load(correction + column, mask=column < experts, other=0.0)[None, :]
        score = tl.where(score > LOWEST, score, LOWEST)  # also where it is NaN
        score = tl.where((column < experts)[None, :], score, float("-inf"))
        chosen = tl.zeros((TOKENS, CHOICES), tl.float32)
        for k in tl.static_range(K):
            best = tl.max(score, axis=1)
            first = tl.min(tl.where(score == best[:, None], column[None, :], BLOCK), axis=1)
            here = column[None, :] == first[:, None]
            tl.store(ids + token.to(tl.int64) * K + k, first, mask=token < tokens)
            of_first = tl.sum(tl.where(here, logit, 0.0), axis=1)
            chosen = tl.where(choice[None, :] == k, of_first[:, None], chosen)
            score = tl.where(here, float("-inf"), score)
    else:
        expert = tl.load(ids + row * K + choice[None, :], mask=taken, other=0)
        chosen = tl.load(logits + row * experts + expert, mask=taken, other=0.0)
    if SIGMOID:
        chosen = tl.sigmoid(chosen)
        if NORMALISE:
            chosen = tl.where(choice[None, :] < K, chosen, 0.0)
            chosen /= tl.sum(chosen, axis=1)[:, None] + EPSILON
    elif NORMALISE:
        chosen = _softmax(chosen, choice[None, :] < K)
    else:
        logit = tl.where((column < experts)[None, :], logit, float("-inf"))
        top = tl.max(logit, axis=1)[:, None]
        chosen = tl.exp(chosen - top) / tl.sum(tl.exp(logit - top), axis=1)[:, None]
    tl.store(weights + row * K + choice[None, :], chosen * SCALE, mask=taken)


@triton.jit
def _backward_kernel(
    logits,
    ids,
    dweights,
    dlogits,
    tokens,
    experts,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    row = token.to(tl.int64)[:, None]
    within = token < tokens
    inside = within[:, None] & (column < experts)[None, :]
    at = row * experts + column[None, :]
    logit = tl.load(logits + at, mask=inside, other=0.0)
    # The weights' gradient at the experts that were chosen, zero elsewhere.
    gradient = tl.zeros((TOKENS, BLOCK), tl.float32)
    chosen = column[None, :] < 0
    for k in tl.static_range(K):
        expert = tl.load(ids + token.to(tl.int64) * K + k, mask=within, other=0)
        one = tl.load(dweights + token.to(tl.int64) * K + k, mask=within, other=0.0).to(tl.float32)
        here = column[None, :] == expert[:, None]
        gradient += tl.where(here, one[:, None], 0.0)
        chosen = chosen | here
    gradient *= SCALE
    if SIGMOID:
        value = tl.sigmoid(logit)
        if NORMALISE:
            total = tl.sum(tl.where(chosen, value, 0.0), axis=1)[:, None] + EPSILON
            gradient = (gradient - tl.sum(gradient * value, axis=1)[:, None] / total) / total
        out = tl.where(chosen, gradient * value * (1.0 - value), 0.0)
    else:
        share = _softmax(logit, chosen if NORMALISE else column[None, :] < experts)
        out = share * (gradient - tl.sum(tl.where(chosen, gradient * share, 0.0), axis=1)[:, None])
    tl.store(dlogits + at, out.to(dlogits.dtype.element_ty), mask=inside)
