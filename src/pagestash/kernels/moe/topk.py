"""The k best experts of each token, ties to the lower id: the same scores choose the same experts anywhere.

`torch.topk` promises no order among equal scores. What moves: the scores once, k ids a token.
"""

import torch

from pagestash.kernels.backend import cdiv, choose, launch, power_of_two, tl, triton

LOWEST = torch.finfo(torch.float32).min
"""What -inf and NaN count as: still better than an expert that was already taken."""
K_LOWEST = tl.constexpr(LOWEST)
ELEMENTS = 2048


def topk(scores: torch.Tensor, k: int, *, backend: str = "auto") -> torch.Tensor:
    """Int32 [T, k]: the columns of the k largest of each row of float32 `scores` [T, E], best first."""
    if scores.ndim != 2 or scores.dtype != torch.float32:
        raise ValueError(
            f"scores {tuple(scores.shape)} of {scores.dtype}: expected float32 [tokens, experts]"
        )
    tokens, experts = scores.shape
    if not 1 <= k <= experts:
        raise ValueError(f"k={k}: expected 1 to {experts}, the number of experts")
    if choose(scores.device, backend) == "torch":
        clean = torch.where(scores > LOWEST, scores, LOWEST)
        return (
            torch.sort(clean, dim=1, descending=True, stable=True).indices[:, :k].to(torch.int32).contiguous()
        )
    ids = torch.empty(tokens, k, dtype=torch.int32, device=scores.device)
    block = power_of_two(experts)
    together = max(1, ELEMENTS // block)
    if tokens:
        launch(
            _topk_kernel,
            (cdiv(tokens, together),),
            scores.device,
            scores.contiguous(),
            ids,
            tokens,
            experts,
            K=k,
            TOKENS=together,
            BLOCK=block,
        )
    return ids


@triton.jit
def _topk_kernel(scores, ids, tokens, experts, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    at = token.to(tl.int64)[:, None] * experts + column[None, :]
    score = tl.load(scores + at, mask=(token < tokens)[:, None] & (column < experts)[None, :], other=0.0)
    score = tl.where(score > K_LOWEST, score, K_LOWEST)  # also where it is NaN
    score = tl.where((column < experts)[None, :], score, float("-inf"))
    for k in tl.static_range(K):
        best = tl.max(score, axis=1)
        first = tl.min(tl.where(score == best[:, None], column[None, :], BLOCK), axis=1)
        tl.store(ids + token.to(tl.int64) * K + k, first, mask=token < tokens)
        score = tl.where(column[None, :] == first[:, None], float("-inf"), score)
