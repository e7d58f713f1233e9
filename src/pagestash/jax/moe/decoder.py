"""A small decoder in plain JAX: attention and a ring-of-experts MoE layer, scanned over layers.

Legend: B batch, S sequence (Q of queries, K of keys), D width, H heads, C width of a head, V vocabulary.

The scan is a parameter: `plain_scan` is a `lax.scan`, `stashed_scan` runs the same layer under `stash_scan`.
The layer does not know which of them runs it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..policy import StashPolicy, StashReport
from ..scan import stash_scan
from .ring import STASHED, RingConfig, init_experts, ring_moe_over

Params = dict[str, Any]
Layer = Callable[[Any, jax.Array], tuple[jax.Array, Any]]
Scan = Callable[[Layer, jax.Array, Any], tuple[jax.Array, Any, StashReport | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of the decoder; those of its MoE layers are in `moe`."""

    vocabulary: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 8
    moe: RingConfig
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        if self.moe.width != self.width:
            raise ValueError(f"width={self.width} but moe.width={self.moe.width}; make them equal")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.width}; choose a divisor")


def init_decoder(key: jax.Array, config: DecoderConfig) -> Params:
    """Fresh parameters; those of the layers are stacked along a leading layer axis."""
    embed, layers = jax.random.split(key)

    def one_layer(key: jax.Array) -> Params:
        qkv, out, experts = jax.random.split(key, 3)
        d = config.width
        return {
            "attention_norm": jnp.ones(d),
            "qkv": jax.random.normal(qkv, (d, 3 * d)) * d**-0.5,
            "out": jax.random.normal(out, (d, d)) * (d * 2 * config.layers) ** -0.5,
            "moe_norm": jnp.ones(d),
            "experts": init_experts(experts, config.moe),
        }

    return {
        "embed": jax.random.normal(embed, (config.vocabulary, config.width)) * 0.5,
        "final_norm": jnp.ones(config.width),
        "layers": jax.vmap(one_layer)(jax.random.split(layers, config.layers)),
    }


def decoder_layer(config: DecoderConfig, mesh: Any) -> Layer:
    """One layer as a function of its own parameters."""
    mixture = ring_moe_over(mesh, config.moe)

    def layer(params: Params, x_BSD: jax.Array) -> tuple[jax.Array, Any]:
        x_BSD = x_BSD + attention(params, rms_norm(x_BSD, params["attention_norm"]), config.heads)
        y_BSD, rows, balance = mixture(params["experts"], rms_norm(x_BSD, params["moe_norm"]))
        return x_BSD + y_BSD, {"rows": rows, "balance": balance}

    return layer


def decoder_loss(
    params: Params, tokens_BS: jax.Array, *, config: DecoderConfig, mesh: Any, scan: Scan
) -> tuple[jax.Array, StashReport | None]:
    """Mean next-token cross entropy plus the balancing loss, and the scan's report."""
    x_BSD = params["embed"][tokens_BS[:, :-1]]
    x_BSD, aux, report = scan(decoder_layer(config, mesh), x_BSD, params["layers"])
    logits_BSV = rms_norm(x_BSD, params["final_norm"]) @ params["embed"].T
    log_p_BSV = jax.nn.log_softmax(logits_BSV)
    nll = -jnp.take_along_axis(log_p_BSV, tokens_BS[:, 1:, None], axis=-1).mean()
    return nll + config.balance_weight * aux["balance"].mean(), report


def plain_scan(layer: Layer, x: jax.Array, params: Any) -> tuple[jax.Array, Any, None]:
    """Save the named tensors whole, one copy per layer."""
    names = jax.checkpoint_policies.save_only_these_names(*STASHED)
    saved = jax.checkpoint(layer, policy=names, prevent_cse=False)
    y, aux = lax.scan(lambda carry, params_l: saved(params_l, carry), x, params)
    return y, aux, None


def stashed_scan(policy: StashPolicy, mesh: Any) -> Scan:
    """Save the valid rows of the named tensors in one buffer."""

    def scan(layer: Layer, x: jax.Array, params: Any) -> tuple[jax.Array, Any, StashReport]:
        return stash_scan(layer, x, params, policy=policy, mesh=mesh)

    return scan


def attention(params: Params, x_BSD: jax.Array, heads: int) -> jax.Array:
    """Causal attention without position embeddings."""
    b, s, d = x_BSD.shape
    q_BSHC, k_BSHC, v_BSHC = (
        (x_BSD @ params["qkv"]).reshape(b, s, 3, heads, d // heads)[:, :, i] for i in range(3)
    )
    scores_BHQK = jnp.einsum("bqhc,bkhc->bhqk", q_BSHC, k_BSHC) * (d // heads) ** -0.5
    scores_BHQK = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores_BHQK, -1e30)
    y_BSHC = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores_BHQK, axis=-1), v_BSHC)
    return y_BSHC.reshape(b, s, d) @ params["out"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def place(params: Params, mesh: Any, axis: str = "expert") -> Params:
    """Put parameters on the mesh: experts split over `axis`, the rest replicated."""

    def home(path: Any, leaf: jax.Array) -> jax.Array:
        keys = jax.tree_util.keystr(path)
        is_expert = "experts" in keys and "router" not in keys
        return jax.device_put(leaf, jax.NamedSharding(mesh, jax.P(None, axis) if is_expert else jax.P()))

    return jax.tree_util.tree_map_with_path(home, params)
