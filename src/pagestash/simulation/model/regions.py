"""Names of a model's regions, and the parts of simulated layers that stand for them.

A simulated layer has fewer parts than a model has modules: one part for the norms of queries and keys, one for all
of latent attention's projections. Names are those of `docs/regions.md`, or of Hugging Face's modules.
"""

from collections.abc import Iterable
from dataclasses import replace

from pagestash.policy import Policy, PoolConfig
from pagestash.simulation.model.parts import HEAD_NORMS, KV_UP, ROPE, Layer

_HUGGING_FACE = {
    "input_layernorm": "attn_norm",
    "self_attn": "attn",
    "self_attn.q_proj": "attn.qkv_linear",
    "self_attn.k_proj": "attn.qkv_linear.k",
    "self_attn.v_proj": "attn.qkv_linear.v",
    "self_attn.q_a_proj": "attn.qkv_linear.q_down",
    "self_attn.q_a_layernorm": "attn.qkv_linear.q_norm",
    "self_attn.q_b_proj": "attn.qkv_linear.q_up",
    "self_attn.kv_a_proj_with_mqa": "attn.qkv_linear.kv_down",
    "self_attn.kv_a_layernorm": "attn.qkv_linear.kv_norm",
    "self_attn.kv_b_proj": "attn.qkv_linear.kv_up",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn.core_attn": "attn.core_attn",
    "self_attn.o_proj": "attn.attn_proj",
    "post_attention_layernorm": "mlp_norm",
    "mlp": "moe",
    "mlp.gate": "moe.router",
    "mlp.router": "moe.router",
    "mlp.experts": "moe.experts",
    "mlp.experts.expert_fc1": "moe.expert_fc1",
    "mlp.experts.moe_act": "moe.moe_act",
    "mlp.experts.expert_fc2": "moe.expert_fc2",
    "mlp.shared_expert": "moe.shared_experts",
    "mlp.shared_experts": "moe.shared_experts",
}
"""Modules of a Hugging Face layer by our names; those of a layer without experts keep theirs (`mlp`)."""
_GROUPED = ("attn.k_norm", "attn.qkv_linear.k", "attn.qkv_linear.v")
_LATENT = tuple(f"attn.qkv_linear.{name}" for name in ("q_down", "q_norm", "q_up", "kv_down", "kv_norm"))
"""Regions that have a part in common with others."""


def aliases(layer: str, inner: str) -> list[str]:
    """Names that a rule may have for a region of a layer: ours first."""
    if not inner:
        return [layer, {"embed": "model.embed_tokens", "head": "lm_head"}.get(layer, f"model.{layer}")]
    found = [theirs for theirs, ours in _HUGGING_FACE.items() if ours == inner]
    if inner == "mlp":
        found.append("mlp")
    return [f"{layer}.{inner}", *(f"model.{layer}.{name}" for name in found)]


def check_policy(policy: Policy, layers: Iterable[Layer]) -> list[str]:
    """Refuse a rule for a region that the model has not; the rules without a part of their own, by pattern.

    A part has the rule of one region, or of one around it: `attn.q_norm`'s holds for `attn.k_norm`, too, and what
    latent attention's inner projections save has the rule of `attn.qkv_linear`.
    """
    theirs = any(rule.match.startswith(("model.", "lm_head")) for rule in policy.rules)
    known: list[str] = []
    applied: list[str] = []
    for layer in layers:
        own, inner = _regions_of(layer)
        applied += [name for region in own for name in aliases(layer.name, region)]
        known += [name for region in (*own, *inner) for name in aliases(layer.name, region)]
    known += ["norm", "model.norm"]
    if not theirs:
        known = [name for name in known if not name.startswith(("model.", "lm_head"))]
    replace(policy, pool=PoolConfig()).check(known)  # the pool is not this machine's
    return [rule.match for rule in policy.rules if not any(map(rule.matches, applied))]


def _regions_of(layer: Layer) -> tuple[list[str], list[str]]:
    """Regions whose rules decide over parts, "" for the layer; and those that are only a piece of a part."""
    if not layer.name.startswith("layers."):
        return [""], []
    parts = [part.name for part in layer.parts]
    around = dict.fromkeys(name.rpartition(".")[0] for name in parts if "." in name)
    if any(piece.maker == KV_UP for part in layer.parts for piece in part.pieces):
        return ["", *around, *parts, KV_UP], list(_LATENT)
    return ["", *around, *parts, ROPE], [
        name for name in _GROUPED if name != "attn.k_norm" or HEAD_NORMS in parts
    ]
