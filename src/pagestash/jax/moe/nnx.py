"""The same decoder as a Flax NNX module; needs `flax`.

The layers are one `Block` whose variables are stacked by `nnx.vmap`. `nnx.split` returns their state, a pytree
that any scan can slice; the scan's body merges it into a block. Dropout's random stream is part of that state,
so keys and counters are scanned with the parameters.

Legend: B batch, S sequence, D width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..policy import StashReport
from .decoder import DecoderConfig, Scan, attention, rms_norm
from .ring import init_experts, ring_moe_over


class Block(nnx.Module):
    """Attention and an MoE layer, each with a norm before it and a residual around it."""

    def __init__(self, config: DecoderConfig, mesh: Any, *, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        d = config.width
        self.config, self.mesh = config, mesh
        self.attention_norm = nnx.Param(jnp.ones(d))
        self.qkv = nnx.Param(jax.random.normal(rngs.params(), (d, 3 * d)) * d**-0.5)
        self.out = nnx.Param(jax.random.normal(rngs.params(), (d, d)) * (d * 2 * config.layers) ** -0.5)
        self.moe_norm = nnx.Param(jnp.ones(d))
        self.experts = nnx.Param(init_experts(rngs.params(), config.moe))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, Any]:
        weights = {"qkv": self.qkv[...], "out": self.out[...]}
        attended_BSD = attention(weights, rms_norm(x_BSD, self.attention_norm[...]), self.config.heads)
        x_BSD = x_BSD + self.dropout(attended_BSD)
        mixture = ring_moe_over(self.mesh, self.config.moe)
        y_BSD, rows, balance = mixture(self.experts.get_value(), rms_norm(x_BSD, self.moe_norm[...]))
        return x_BSD + y_BSD, {"rows": rows, "balance": balance}


class Decoder(nnx.Module):
    """Embedding, a scanned stack of blocks, and tied output weights."""

    def __init__(self, config: DecoderConfig, mesh: Any, *, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        self.config = config
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocabulary, config.width)) * 0.5)
        self.final_norm = nnx.Param(jnp.ones(config.width))

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, mesh, rngs=rngs, dropout=dropout)

        self.blocks = stack(rngs)

    def loss(self, tokens_BS: jax.Array, scan: Scan) -> tuple[jax.Array, StashReport | None]:
        """Mean next-token cross entropy plus the balancing loss, and the scan's report."""
        x_BSD = self.embed[...][tokens_BS[:, :-1]]
        definition, state = nnx.split(self.blocks)

        def layer(state_l: Any, x_BSD: jax.Array) -> tuple[jax.Array, Any]:
            return nnx.merge(definition, state_l)(x_BSD)

        x_BSD, aux, report = scan(layer, x_BSD, state)
        log_p_BSV = jax.nn.log_softmax(rms_norm(x_BSD, self.final_norm[...]) @ self.embed[...].T)
        nll = -jnp.take_along_axis(log_p_BSV, tokens_BS[:, 1:, None], axis=-1).mean()
        return nll + self.config.balance_weight * aux["balance"].mean(), report
