"""Attention against code that spells it out, head by head."""

import math

import pytest
import torch

from pagestash.models.attention import GroupedAttention, LatentAttention, RMSNorm, RoPE, rotation
from pagestash.models.config import preset

S = 7


def turn(x_SD, theta):
    """RoPE as complex multiplication."""
    half = x_SD.shape[-1] // 2
    pairs = torch.complex(x_SD[..., :half], x_SD[..., half:])
    angle = torch.tensor(
        [[s * theta ** (-2 * i / x_SD.shape[-1]) for i in range(half)] for s in range(x_SD.shape[0])]
    )
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attend(q_SD, k_SD, v_SD):
    """One head, one token at a time."""
    rows = []
    for s in range(q_SD.shape[0]):
        scores = k_SD[: s + 1] @ q_SD[s] / math.sqrt(q_SD.shape[1])
        rows.append(torch.softmax(scores, 0) @ v_SD[: s + 1])
    return torch.stack(rows)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_queries_agree_with_one_head_at_a_time(kv_heads, qk_norm, bias):
    torch.manual_seed(0)
    config = preset(
        "tiny", width=24, heads=4, head_dim=8, kv_heads=kv_heads, qk_norm=qk_norm, attention_bias=bias
    )
    layer = GroupedAttention(config)
    if qk_norm:
        torch.nn.init.uniform_(layer.q_norm.weight, 0.5, 1.5)
    x = torch.randn(2, S, 24)
    y = layer(x, rotation(S, 8, config.rope_theta))
    for sequence, result in zip(x, y):
        qkv = layer.qkv_linear(sequence)
        q, k, v = qkv.split([32, 8 * kv_heads, 8 * kv_heads], dim=1)
        heads = []
        for head in range(4):
            group = head // (4 // kv_heads)
            q_h, k_h, v_h = q[:, 8 * head :][:, :8], k[:, 8 * group :][:, :8], v[:, 8 * group :][:, :8]
            if qk_norm:
                q_h = normed(q_h, layer.q_norm.weight, config.norm_eps)
                k_h = normed(k_h, layer.k_norm.weight, config.norm_eps)
            heads.append(attend(turn(q_h, config.rope_theta), turn(k_h, config.rope_theta), v_h))
        torch.testing.assert_close(result, layer.attn_proj(torch.cat(heads, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("q_rank", [0, 12])
def test_latent_attention_agrees_with_one_head_at_a_time(q_rank):
    torch.manual_seed(0)
    shape = {"q_rank": q_rank, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
    config = preset("tiny", attention="mla", width=24, heads=3, **shape)
    layer = LatentAttention(config)
    make = layer.qkv_linear
    x = torch.randn(2, S, 24)
    y = layer(x, rotation(S, 4, config.rope_theta))
    for sequence, result in zip(x, y):
        latent = sequence
        if q_rank:
            latent = normed(make.q_down(sequence), make.q_norm.weight, config.norm_eps)
        q = make.q_up(latent).view(S, 3, 10)
        kv = make.kv_down(sequence)
        turned_key = turn(kv[:, 10:], config.rope_theta)
        up = make.kv_up(normed(kv[:, :10], make.kv_norm.weight, config.norm_eps)).view(S, 3, 11)
        heads = []
        for head in range(3):
            q_h = torch.cat([q[:, head, :6], turn(q[:, head, 6:], config.rope_theta)], 1)
            k_h = torch.cat([up[:, head, :6], turned_key], 1)
            heads.append(attend(q_h, k_h, up[:, head, 6:]))
        torch.testing.assert_close(result, layer.attn_proj(torch.cat(heads, 1)), rtol=1e-5, atol=1e-6)


def test_rotation_depends_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 16)
    by = rotation(32, 16, 10_000.0)

    def score(s, t):
        turned_q, turned_k = RoPE()(*(x.expand(1, 1, 32, 16) for x in (q, k)), by)
        return turned_q[0, 0, s] @ turned_k[0, 0, t]

    torch.testing.assert_close(score(9, 4), score(25, 20))
    assert abs(score(9, 4) - score(9, 5)) > 1e-3
    torch.testing.assert_close(score(0, 0), q @ k)


def test_rotation_keeps_lengths_and_precision():
    q, k = torch.randn(2, 3, 8, 16, dtype=torch.bfloat16), torch.randn(2, 1, 8, 16, dtype=torch.bfloat16)
    for x, turned in zip((q, k), RoPE()(q, k, rotation(8, 16, 10_000.0))):
        assert turned.dtype == torch.bfloat16
        torch.testing.assert_close(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=1e-2, atol=0)


def test_norm_follows_its_input():
    norm = RMSNorm(8, 1e-6)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), normed(x, 1.0, 1e-6))
    assert norm(x.bfloat16()).dtype == torch.bfloat16
