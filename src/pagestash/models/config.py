"""What a decoder is made of, and the published shapes."""

import sys
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from pagestash.moe.config import ExpertSettings, MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ExpertSettings):
    """Shapes and choices of a `Decoder`; the defaults are those of most models."""

    vocab: int
    layers: int
    heads: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    attention: Literal["gqa", "mla"] = "gqa"
    attention_bias: bool = False
    kv_heads: int = 0
    """Grouped-query attention: heads of keys and values, 0 for as many as there are queries."""
    head_dim: int = 0
    """Grouped-query attention: 0 for width / heads."""
    qk_norm: bool = False
    q_rank: int = 0
    """Latent attention: rank of the queries' latent; 0 projects queries from the input."""
    kv_rank: int = 0
    nope_dim: int = 0
    """Latent attention: dimensions of a head without RoPE, beside `rope_dim` with it."""
    rope_dim: int = 0
    v_dim: int = 0

    dense_layers: int = 0
    """The first layers have a dense MLP of `dense_width` instead of experts."""
    dense_width: int = 0
    expert_bias: bool = False
    """Biases on both projections of the routed experts."""

    # Only a simulation has these (`SIMULATED`).
    mtp_layers: int = 0
    """Layers that predict further tokens (DeepSeek-V3's multi-token prediction)."""
    window: int = 0
    """Tokens that a token of a layer with a sliding window attends to; 0: no layer has one."""
    full_every: int = 0
    """With a window: every so many layers one attends to all tokens; 0: none does."""
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    latent_width: int = 0
    """Width of the rows that experts receive and return, between two projections; 0: the model's."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                bound = f"at most {high}" if value > high else f"at least {low}"
                raise ValueError(f"{name}={value}: expected {bound}")
        if self.attention == "gqa":
            self._check_grouped()
        elif self.attention == "mla":
            for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}={getattr(self, name)}: latent attention needs at least 1")
        else:
            raise ValueError(f"attention={self.attention!r}: expected 'gqa' or 'mla'")
        rotated = self.rope_dim if self.attention == "mla" else self.head_size
        if rotated % 2:
            raise ValueError(f"RoPE rotates {rotated} of a head's dimensions: expected an even number")
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers={self.dense_layers}: there are layers={self.layers}")
        if self.dense_layers and self.dense_width < 1:
            raise ValueError(
                f"dense_width={self.dense_width}: {self.dense_layers} dense layers need at least 1"
            )
        if self.full_every and not self.window:
            raise ValueError(
                f"full_every={self.full_every}: it is for layers with a window, and there is none"
            )
        ExpertSettings.__post_init__(self)  # (a class with slots has no super() here)

    def _check_grouped(self) -> None:
        if self.kv_heads < 0 or self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if not self.head_dim and self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; give head_dim")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def moe(self) -> MoEConfig:
        """The configuration of every MoE layer."""
        shared = {field.name: getattr(self, field.name) for field in fields(ExpertSettings)}
        return MoEConfig(**shared, bias=self.expert_bias)


SIMULATED = ("mtp_layers", "window", "tied", "latent_width")
"""Fields that only a simulation has: a `Decoder` refuses them."""
_COUNT, _FINITE = 2**31 - 1, sys.float_info.max
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("vocab", "width", "heads", "experts", "top_k", "expert_width"), (1, _COUNT)),
    **dict.fromkeys(
        ("kv_heads", "head_dim", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim"), (0, _COUNT)
    ),
    **dict.fromkeys(("dense_width", "shared_experts"), (0, _COUNT)),
    **dict.fromkeys(("norm_eps", "balance_loss", "z_loss"), (0, _FINITE)),
    "layers": (1, 10_000),
    "mtp_layers": (0, 16),
    **dict.fromkeys(("window", "full_every", "latent_width"), (0, _COUNT)),
    "rope_theta": (sys.float_info.min, _FINITE),
    "route_scale": (-_FINITE, _FINITE),
}
"""The least and the most that a field may be."""

PRESETS: dict[str, DecoderConfig] = {
    # Small enough for a CPU: 0.9 M parameters.
    "tiny": DecoderConfig(
        vocab=256,
        width=128,
        layers=4,
        heads=4,
        kv_heads=2,
        qk_norm=True,
        dense_layers=1,
        dense_width=256,
        experts=8,
        top_k=2,
        expert_width=64,
        balance_loss=1e-2,
    ),
    "qwen3-30b-a3b": DecoderConfig(
        vocab=151_936,
        width=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        qk_norm=True,
        rope_theta=1e6,
        experts=128,
        top_k=8,
        expert_width=768,
        balance_loss=1e-3,
    ),
    "deepseek-v2-lite": DecoderConfig(
        vocab=102_400,
        width=2048,
        layers=27,
        heads=16,
        attention="mla",
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        dense_layers=1,
        dense_width=10_944,
        experts=64,
        top_k=6,
        expert_width=1408,
        shared_experts=2,
        normalise=False,
        balance_loss=1e-3,
    ),
    "deepseek-v3": DecoderConfig(
        vocab=129_280,
        width=7168,
        layers=61,
        heads=128,
        attention="mla",
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        dense_layers=3,
        dense_width=18_432,
        experts=256,
        top_k=8,
        expert_width=2048,
        shared_experts=1,
        score="sigmoid",
        route_scale=2.5,
        correction_bias=True,
        groups=8,
        group_limit=4,
        balance_loss=1e-4,
    ),
    # The shapes; attention is causal over the whole sequence and has no sinks.
    "gpt-oss-20b": DecoderConfig(
        vocab=201_088,
        width=2880,
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        attention_bias=True,
        norm_eps=1e-5,
        rope_theta=150_000.0,
        experts=32,
        top_k=4,
        expert_width=2880,
        expert_bias=True,
        activation="clamped",
        balance_loss=1e-3,
    ),
}
"""Shapes as published, under the models' names."""


def preset(name: str, layers: int | None = None, **changes: Any) -> DecoderConfig:
    """The preset `name`, shortened to `layers` layers (at least one with experts), with `changes` to its fields.

    Examples:
        >>> preset("qwen3-30b-a3b", layers=2).layers
        2
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{_meant(name, list(PRESETS))}")
    known = [field.name for field in fields(DecoderConfig)]
    for key in changes:
        if key not in known:
            raise ValueError(f"model: unknown key {key!r}{_meant(key, known)}")
    return replace(shortened(PRESETS[name], layers), **changes)


def shortened(config: DecoderConfig, layers: int | None) -> DecoderConfig:
    """With so many layers, at least one of them with experts: most of what a cut model is for happens there."""
    if layers is None:
        return config
    if layers < 1:
        raise ValueError(f"layers={layers}: expected at least 1")
    return replace(config, layers=layers, dense_layers=min(config.dense_layers, layers - 1))


def _meant(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(known)}"
