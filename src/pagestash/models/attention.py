"""Causal self-attention: grouped queries, and DeepSeek's latent attention.

B sequences of S tokens, W the model's width, H heads of queries, G heads of keys and values, D dimensions a head, L
dimensions of a latent. Both kinds are a `qkv_linear`, a `core_attn` and an `attn_proj`, so that one rule fits both.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pagestash.kernels.layer.rms_norm import rms_norm
from pagestash.kernels.layer.rope import rope
from pagestash.models.config import DecoderConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [1, S, D / 2], float32."""

SHORT = 256
"""Elements of a row up to which our norm is several times as fast as torch's, which has a block of threads for each
row. (Heads of 128 on an H200, forward: 0.04 ms instead of 0.25.)"""


class RMSNorm(nn.Module):
    """Root-mean-square norm whose weight follows its input's precision."""

    def __init__(self, width: int, eps: float, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        if x.is_cuda and x.shape[-1] <= SHORT:
            return rms_norm(x, weight, self.eps, early=False)
        return F.rms_norm(x, weight.shape, weight, self.eps)


def rotation(length: int, dim: int, theta: float, device: Any = None) -> Rotation:
    """RoPE's angles for positions 0 to `length` - 1: position · theta^(-2i/dim) for pair i of a head."""
    pair = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    position = torch.arange(length, dtype=torch.float32, device=device)
    angle = torch.outer(position, theta ** (-pair / dim))[None]
    return angle.cos(), angle.sin()


class RoPE(nn.Module):
    """Rotates the pairs (x[i], x[i + D/2]) of each head by its position's angles, in float32 or wider.

    Backward keeps the angles and nothing of the size of queries and keys.
    """

    def forward(
        self, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, by: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q_BHSD, k_BGSD, *by, style="half_table", wide=True)


class CoreAttention(nn.Module):
    """Softmax attention over earlier tokens and the token itself: [B, H, S, D] queries to [B, S, H · D]."""

    def forward(self, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
        grouped = q_BHSD.shape[1] != k_BGSD.shape[1]
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=grouped)
        return out_BHSD.transpose(1, 2).flatten(2)


class GroupedAttention(nn.Module):
    """Grouped-query attention: each head of keys and values serves H / G heads of queries."""

    def __init__(self, config: DecoderConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": dtype}
        self.dim = config.head_size
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        bias = config.attention_bias
        rows = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv_linear = nn.Linear(config.width, rows, bias=bias, **made)
        self.q_norm = RMSNorm(self.dim, config.norm_eps, **made) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.norm_eps, **made) if config.qk_norm else None
        self.rope = RoPE()
        self.core_attn = CoreAttention()
        self.attn_proj = nn.Linear(self.heads * self.dim, config.width, bias=bias, **made)

    def forward(self, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        qkv = self.qkv_linear(x).unflatten(-1, (-1, self.dim))
        q_BSHD, k_BSGD, v_BSGD = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSGD = self.q_norm(q_BSHD), self.k_norm(k_BSGD)
        q_BHSD, k_BGSD = self.rope(q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), by)
        return self.attn_proj(self.core_attn(q_BHSD, k_BGSD, v_BSGD.transpose(1, 2)))


class LatentQKV(nn.Module):
    """Queries, keys and values projected from narrow latents; the key's part with RoPE is one for all heads."""

    def __init__(self, config: DecoderConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": dtype}
        self.config = config
        heads, width, bias = config.heads, config.width, config.attention_bias
        q_rows = heads * (config.nope_dim + config.rope_dim)
        self.q_down = nn.Linear(width, config.q_rank, bias=bias, **made) if config.q_rank else None
        self.q_norm = RMSNorm(config.q_rank, config.norm_eps, **made) if config.q_rank else None
        self.q_up = nn.Linear(config.q_rank or width, q_rows, bias=False, **made)
        self.kv_down = nn.Linear(width, config.kv_rank + config.rope_dim, bias=bias, **made)
        self.kv_norm = RMSNorm(config.kv_rank, config.norm_eps, **made)
        self.kv_up = nn.Linear(config.kv_rank, heads * (config.nope_dim + config.v_dim), bias=False, **made)

    def forward(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, heads = self.config, self.config.heads
        latent_BSL = x
        if self.q_down is not None and self.q_norm is not None:
            latent_BSL = self.q_norm(self.q_down(x))
        q_BSHD = self.q_up(latent_BSL).unflatten(-1, (heads, -1))
        q_nope, q_rope = q_BSHD.split([config.nope_dim, config.rope_dim], dim=-1)
        latent_BSL, k_rope = self.kv_down(x).split([config.kv_rank, config.rope_dim], dim=-1)
        kv_BSHD = self.kv_up(self.kv_norm(latent_BSL)).unflatten(-1, (heads, -1))
        k_nope, v_BSHD = kv_BSHD.split([config.nope_dim, config.v_dim], dim=-1)
        q_rope, k_rope = rope(q_rope, k_rope.unsqueeze(2), *by, style="half_table", wide=True, heads_dim=2)
        q_BSHD = torch.cat([q_nope, q_rope], dim=-1)
        k_BSHD = torch.cat([k_nope, k_rope.expand(-1, -1, heads, -1)], dim=-1)
        return q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), v_BSHD.transpose(1, 2)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 and V3)."""

    def __init__(self, config: DecoderConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": dtype}
        self.qkv_linear = LatentQKV(config, **made)
        self.core_attn = CoreAttention()
        self.attn_proj = nn.Linear(
            config.heads * config.v_dim, config.width, bias=config.attention_bias, **made
        )

    def forward(self, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        return self.attn_proj(self.core_attn(*self.qkv_linear(x, by)))


def make_attention(
    config: DecoderConfig, device: Any = None, dtype: torch.dtype | None = None
) -> GroupedAttention | LatentAttention:
    """The attention that the configuration names."""
    kind = LatentAttention if config.attention == "mla" else GroupedAttention
    return kind(config, device, dtype)
