"""What each layer of a `Decoder` costs, by formula: for placing layers before anything was measured.

Shapes, for one token: d the model's width, H heads and G of keys and values of D dimensions, K experts of width n.
Saved by a layer on a GPU, in elements (the operations keep nothing else of size):

    norms and what they feed     4·d                        both norms keep their input, both projections theirs
    grouped attention            (H + 2·G)·D + (H + G)·D + H·D    projection, queries and keys after RoPE, result
    latent attention             the latents and their norms, whole queries, keys and the values' projection, result
    experts                      2·n·K (and d·K where rows come over the wire)
    dense or shared MLP          2·(its width)

and the head keeps its norm's input, and the gradients that it computes with the loss.
"""

from dataclasses import replace

from pagestash.models.config import DecoderConfig
from pagestash.models.decoder import Block
from pagestash.moe.parts import ExpertLinear
from pagestash.pipeline.costs import LayerCost

_INDEX = 4  # bytes of an index, a weight, or a row's statistic


def layer_costs(
    config: DecoderConfig,
    *,
    tokens: int,
    sequence: int | None = None,
    element_bytes: int = 2,
    parameter_bytes: float = 16.0,
    expert_parallel: int = 1,
    shards: int = 1,
) -> list[LayerCost]:
    """Embedding, layers and head, for a microbatch of `tokens` in sequences of `sequence` (one, unless it says).

    `parameter_bytes` is what a parameter keeps on the device in all: 16 for float32 weight and gradient and two
    moments of Adam. `shards` ranks hold a stage together, each a part of its parameters (FSDP); `expert_parallel`
    of them share the experts, whose rows then come over the wire. Times are in 10¹² floating-point operations.
    """
    for name, value in (("tokens", tokens), ("expert_parallel", expert_parallel), ("shards", shards)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    sequence = tokens if sequence is None else sequence
    if sequence < 1 or tokens % sequence:
        raise ValueError(f"sequence={sequence} does not divide the {tokens} tokens of a microbatch")
    if shards % expert_parallel or config.experts % expert_parallel:
        raise ValueError(
            f"expert_parallel={expert_parallel} does not divide {config.experts} experts and {shards} ranks a stage"
        )
    b, d, vocab = element_bytes, config.width, config.vocab

    def made(name: str, parameters: int, saved: int, forward: float, backward: float) -> LayerCost:
        return LayerCost(
            name=name,
            parameters=round(parameters * parameter_bytes / shards),
            activations=tokens * saved,
            forward=tokens * forward / 1e12,
            backward=tokens * backward / 1e12,
        )

    def block(dense: bool) -> tuple[int, int, float]:
        """Parameters, saved bytes a token, and operations a token of a layer's forward."""
        layer = Block(config, dense=dense, device="meta")
        parameters = sum(p.numel() for p in layer.parameters())
        routed = sum(
            p.numel() for m in layer.modules() if isinstance(m, ExpertLinear) for p in m.parameters()
        )
        met = parameters - routed + routed * config.top_k / config.experts
        attention, statistics, scores = _attention(config, sequence)
        saved = b * (4 * d + attention) + 2 * _INDEX + statistics
        parts = 2 if config.gated else 1
        if dense:
            saved += b * parts * config.dense_width
        else:
            saved += b * parts * config.expert_width * (config.top_k + config.shared_experts)
            saved += b * d * config.top_k if expert_parallel > 1 else 0
            saved += 4 * _INDEX * config.top_k  # weights, ids, and the order both ways
        return parameters, saved, 2 * met + scores

    kinds = {dense: block(dense) for dense in {index < config.dense_layers for index in range(config.layers)}}
    costs = [made("embed", vocab * d, 8, 0.0, 0.0)]
    for index in range(config.layers):
        parameters, saved, operations = kinds[index < config.dense_layers]
        costs.append(made(f"layers.{index}", parameters, saved, operations, 2 * operations))
    # The loss computes both gradients at once, so that no logits are kept; the weight's is in float32.
    head = made("head", (vocab + 1) * d, b * 2 * d + _INDEX, 6 * vocab * d, 0.0)
    return [*costs, replace(head, activations=head.activations + 4 * vocab * d)]


def _attention(config: DecoderConfig, sequence: int) -> tuple[int, int, float]:
    """Saved elements, bytes of statistics, and the scores' operations, for one token."""
    heads = config.heads
    if config.attention == "mla":
        queries, values = heads * (config.nope_dim + config.rope_dim), heads * config.v_dim
        latents = 2 * config.kv_rank + config.rope_dim + 2 * config.q_rank
        saved = latents + 2 * queries + heads * (config.nope_dim + config.v_dim) + values
        norms = 2 if config.q_rank else 1
    else:
        size, shared = config.head_size, config.kv_heads or heads
        queries = values = heads * size
        saved = (heads + 2 * shared) * size + (heads + shared) * size + heads * size
        norms = heads + shared if config.qk_norm else 0
    # A query looks at half the sequence on average; two products, two operations each.
    return saved, _INDEX * (heads + norms), sequence * (queries + values)
