"""The modules of a decoder's layers as parts, on one rank of a layout.

Names are the regions of `docs/regions.md`, so that a policy's rules match them; saved bytes are its formulas, whose
sum over a layer is that of `models/costs.py`. Attention and dense MLPs have 1 / TP of their heads and width, for T
tokens; experts have 1 / EP of the experts (letters: `parts.py`).
"""

from dataclasses import replace

from pagestash.simulation.model.parts import (
    ACTIVATION,
    HEAD_NORMS,
    HELD,
    KV_UP,
    RESIDUAL,
    ROPE,
    STATISTICS,
    UP,
    Layer,
    Part,
    Piece,
    Product,
)
from pagestash.simulation.model.run import Run

_INDEX = 4  # bytes of an index, a weight, or a row's statistic


def layers_of(run: Run) -> list[Layer]:
    """Embedding, layers, those of multi-token prediction, and head."""
    config = run.config
    attention = {window: tuple(_attention(run, window)) for window in {0, config.window}}
    dense, experts = tuple(_dense(run)) if config.dense_layers else (), tuple(_experts(run))
    # Layers that are alike have the same tuple of parts: they are costed once.
    kinds = {
        (window, routed): (*own, *(experts if routed else dense))
        for window, own in attention.items()
        for routed in (False, True)
    }
    ep = run.layout.ep
    sent = run.element_bytes * run.row_width * run.rows * (ep - 1) / ep
    blocks = []
    for index in range(config.layers):
        routed = index >= config.dense_layers
        whole = config.full_every and (index + 1) % config.full_every == 0
        parts = kinds[0 if whole else config.window, routed]
        blocks.append(Layer(name=f"layers.{index}", parts=parts, dispatch_bytes=sent if routed else 0.0))
    for index in range(config.mtp_layers):
        parts = (_joined(run, first=index == 0), *kinds[config.window, True], *_head_again(run))
        blocks.append(Layer(name=f"layers.{config.layers + index}", parts=parts, dispatch_bytes=sent))
    return [_embedding(run), *blocks, _head(run)]


def model_operations(run: Run) -> float:
    """Floating-point operations of the whole step, all ranks: forward and backward, without recompute."""
    ranks = run.layout.tp * run.layout.cp * run.layout.dp  # of one pipeline rank
    return 3 * ranks * run.microbatches * sum(layer.operations for layer in layers_of(run))


def _joined(run: Run, *, first: bool) -> Part:
    """What a layer of multi-token prediction begins with: norms of its two inputs, and a projection of both to one.

    One input is what the layers gave, the other the embedding of the next tokens. The embedding's weight is shared;
    a pipeline's last rank has a copy of it.
    """
    width, tokens, stream = run.config.width, run.local_tokens, run.stream_bytes
    projection = 2 * width**2
    copied = _embedding(run).parameters if first and run.layout.pp > 1 else 0
    return Part(
        name="mtp.proj",
        pieces=(
            Piece(2 * stream + 2 * _INDEX * tokens, HELD),  # both inputs; the norms' statistics
            Piece(run.product_input(2 * width * tokens), HELD),
        ),
        parameters=projection + 2 * width + copied,
        products=(Product(tokens, width, 2 * width),),
        kernels=4,
        traffic=10 * stream,
        temporary=3 * stream,
        weight_gradient=_weights(run, projection),
    )


def _head_again(run: Run) -> tuple[Part, Part]:
    """What it ends with: a norm of its own, and the head, whose weight it shares."""
    norm, head = _head(run).parts
    return replace(norm, name="mtp.norm"), replace(head, name="mtp.head", parameters=0)


def _gathers(run: Run) -> tuple[float, ...]:
    """An all-gather before, and a reduce-scatter after."""
    whole = run.element_bytes * run.config.width * run.tokens
    return (whole, whole) if run.layout.tp > 1 else ()


def _norm(run: Run, name: str, maker: str) -> Part:
    stream = run.stream_bytes
    return Part(
        name=name,
        pieces=(Piece(stream, maker), Piece(_INDEX * run.local_tokens, name)),
        parameters=run.config.width,
        kernels=1,
        norms=1,
        traffic=4 * stream,  # the residual sum before it, too
        temporary=2 * stream,
    )


def _weights(run: Run, parameters: int) -> int:
    """Bytes of a weight gradient as a temporary tensor."""
    return run.element_bytes * parameters if run.framework.weight_gradients else 0


def _attention(run: Run, window: int) -> list[Part]:
    config, tp, tokens, b = run.config, run.layout.tp, run.tokens, run.element_bytes
    parts = [_norm(run, "attn_norm", HELD)]
    heads = config.heads // tp
    copies, viewed = run.framework.copies_values, 0
    if config.attention == "mla":
        queries, values = heads * (config.nope_dim + config.rope_dim), heads * config.v_dim
        keys = queries
        gathered = keys + values
        parts.append(_latent_qkv(run, queries))
        pieces = [
            Piece(tokens * b * 2 * queries, UP),
            Piece(tokens * b * heads * (config.v_dim + (0 if copies else config.nope_dim)), KV_UP),
        ]
    else:
        size, shared = config.head_size, (config.kv_heads or config.heads) // tp
        queries = keys = values = heads * size
        fused = (heads + 2 * shared) * size
        bias = fused if config.attention_bias else 0
        parts.append(
            Part(
                name="attn.qkv_linear",
                pieces=(Piece(run.product_input(config.width * run.local_tokens), "attn_norm"),),
                parameters=config.width * fused + bias,
                products=(Product(tokens, fused, config.width),),
                temporary=b * tokens * (fused + config.width),
                weight_gradient=_weights(run, config.width * fused),
                gathers=_gathers(run),
            )
        )
        pieces = [Piece(tokens * b * (heads + shared) * size, ROPE)]
        gathered = 2 * shared * size
        rest = tokens * b * (heads + shared) * size  # of the projection, beside the values
        viewed = rest if copies else 0
        if config.qk_norm:
            parts.append(
                Part(
                    name=HEAD_NORMS,
                    pieces=(
                        Piece(tokens * b * fused, "attn.qkv_linear"),
                        Piece(tokens * _INDEX * (heads + shared), HEAD_NORMS),
                    ),
                    parameters=2 * size,
                    kernels=4,  # two norms, RoPE of queries and keys
                    norms=1,
                    traffic=4 * b * tokens * (heads + shared) * size,  # norm and RoPE
                    temporary=2 * b * tokens * fused,
                )
            )
        else:
            pieces.append(Piece(tokens * b * fused - viewed, "attn.qkv_linear"))
    core = Part(
        name="attn.core_attn",
        pieces=(
            *pieces,
            Piece(tokens * b * values, "attn.core_attn"),
            Piece(tokens * _INDEX * heads, STATISTICS),
        ),
        kernels=1,
        scores=2 * tokens * run.attended(window) * (queries + values),
        traffic=2 * b * tokens * (queries + keys),
        # Gradients of queries, keys and values, of the result, and a sum of queries' gradients in float32.
        temporary=tokens * (b * (queries + keys + 2 * values) + 4 * queries),
        context_bytes=b * tokens * run.layout.cp * gathered if run.layout.cp > 1 else 0.0,
        view_bytes=viewed,
    )
    width = config.width
    bias = width if config.attention_bias else 0
    projection = Part(
        name="attn.attn_proj",
        # In 16 bits its input is attention's own result; in fewer it is a copy.
        pieces=(Piece(run.product_input(values * tokens), "attn.attn_proj"),) if run.quantized else (),
        parameters=values * width + bias,
        kernels=1,  # the residual sum
        products=(Product(tokens, width, values),),
        temporary=b * tokens * (width + values),
        weight_gradient=_weights(run, values * width),
    )
    return [*parts, core, projection]


def _latent_qkv(run: Run, queries: int) -> Part:
    config, tp, tokens, b = run.config, run.layout.tp, run.tokens, run.element_bytes
    width, heads = config.width, config.heads // tp
    keys_values = heads * (config.nope_dim + config.v_dim)
    latents = config.q_rank + config.kv_rank
    down = width * (config.q_rank + config.kv_rank + config.rope_dim)
    up = (config.q_rank or width) * queries + config.kv_rank * keys_values
    products = [
        Product(tokens, config.kv_rank + config.rope_dim, width),
        Product(tokens, keys_values, config.kv_rank),
        Product(tokens, queries, config.q_rank or width),
    ]
    if config.q_rank:
        products.append(Product(tokens, config.q_rank, width))
    norms = 2 if config.q_rank else 1
    bias = config.q_rank + config.kv_rank + config.rope_dim if config.attention_bias else 0
    return Part(
        name="attn.qkv_linear",
        pieces=(
            Piece(run.product_input(width * run.local_tokens), "attn_norm"),
            Piece(tokens * (b * (2 * latents + config.rope_dim) + norms * _INDEX), "attn.qkv_linear"),
        ),
        parameters=down + up + latents + bias,
        products=tuple(products),
        kernels=8,  # norms, RoPE, and the parts of heads put together
        norms=norms,
        traffic=2 * b * tokens * (2 * queries + keys_values),
        temporary=b * tokens * (queries + keys_values + width),
        weight_gradient=_weights(run, up),
        gathers=_gathers(run),
    )


def _dense(run: Run) -> list[Part]:
    config = run.config
    inner = config.dense_width // run.layout.tp
    return [_norm(run, "mlp_norm", RESIDUAL), _mlp(run, "mlp", inner, new_input=True)]


def _mlp(run: Run, name: str, inner: int, *, new_input: bool) -> Part:
    """A dense MLP of width `inner` on this rank."""
    config, tokens, b = run.config, run.tokens, run.element_bytes
    parts = 2 if config.gated else 1
    kept = b * parts * tokens * inner + run.product_input(run.framework.dense_activations * tokens * inner)
    own_input = new_input or run.quantized  # the router's input is the same tensor, in 16 bits
    parameters = (parts + 1) * config.width * inner
    return Part(
        name=name,
        pieces=(
            *((Piece(run.product_input(config.width * run.local_tokens), "mlp_norm"),) if own_input else ()),
            Piece(kept, name),
        ),
        parameters=parameters,
        products=(Product(tokens, parts * inner, config.width), Product(tokens, config.width, inner)),
        kernels=2,
        traffic=b * tokens * (parts + 1) * inner,
        temporary=b * tokens * ((parts + 1) * inner + config.width),
        weight_gradient=_weights(run, parameters),
        gathers=_gathers(run),
    )


def _experts(run: Run) -> list[Part]:
    config, frame, b = run.config, run.framework, run.element_bytes
    d, n, rows, tokens = run.row_width, config.expert_width, run.rows, run.local_tokens
    width = config.width
    here = config.experts // run.layout.ep
    parts, fused = 2 if config.gated else 1, frame.fused_experts
    moved = rows if run.layout.ep > 1 or frame.keeps_rows else 0
    bias = here * (parts * n + d) if config.expert_bias else 0
    passes = 2 if run.sorts_rows and min(here, run.layout.ep) > 1 else 1  # of all rows, in and out
    found = [
        _norm(run, "mlp_norm", RESIDUAL),
        Part(
            name="moe.router",
            pieces=(Piece(b * width * tokens, "mlp_norm"), Piece(_INDEX * config.top_k * tokens, HELD)),
            parameters=width * config.experts,
            products=(Product(tokens, config.experts, width),),
            kernels=10,  # scores, choice, counts, auxiliary loss
            traffic=3 * _INDEX * config.experts * tokens,
            temporary=b * width * tokens + 2 * _INDEX * config.experts * tokens,
        ),
        Part(
            name="moe.experts",
            pieces=(Piece(3 * _INDEX * config.top_k * tokens, HELD),),
            kernels=12,  # positions of rows, permutation, dispatch, combine, the residual sum
        ),
        Part(
            name="moe.expert_fc1",
            pieces=(Piece(run.product_input(d * moved), HELD),),
            routed=True,
            expert=True,
            parameters=here * parts * n * d + bias,
            products=(Product(rows / here, parts * n, d, here),),
            traffic=passes * 2 * b * d * rows,  # permuted
            temporary=b * (d + parts * n) * rows,
            weight_gradient=_weights(run, here * (parts + fused) * n * d),
        ),
        Part(
            name="moe.moe_act",
            pieces=(Piece(b * parts * n * rows, "moe.moe_act"),),
            routed=True,
            kernels=1,
            traffic=b * (parts + 1) * n * rows,
            temporary=b * n * (1 if fused else parts + 1) * rows,
        ),
        Part(
            name="moe.expert_fc2",
            pieces=(Piece(run.product_input(n * frame.activations * rows), ACTIVATION),),
            routed=True,
            expert=True,
            parameters=here * n * d,
            products=(Product(rows / here, d, n, here),),
            traffic=passes * 2 * b * d * rows,  # summed into tokens
            temporary=b * (d + n) * rows,
            weight_gradient=_weights(run, here * n * d),
        ),
    ]
    if frame.keeps_combined:
        combined = Piece(b * d * rows, HELD)
        found.append(Part(name="moe.combine", pieces=(combined,), routed=True, temporary=2 * b * d * rows))
    if config.latent_width:
        found.append(
            Part(
                name="moe.latent",  # into rows, and out of their sums
                pieces=(Piece(run.product_input(d * tokens), HELD),),
                parameters=2 * width * d,
                products=(Product(tokens, d, width), Product(tokens, width, d)),
                temporary=b * (width + d) * tokens,
                weight_gradient=_weights(run, width * d),
            )
        )
    if config.shared_experts:
        inner = config.expert_width * config.shared_experts // run.layout.tp
        found.append(_mlp(run, "moe.shared_experts", inner, new_input=False))
    return found


def _embedding(run: Run) -> Layer:
    config = run.config
    vocab = -(-config.vocab // run.layout.tp)
    table = Part(
        name="embed",
        pieces=(Piece(2 * _INDEX * run.local_tokens, HELD),),
        parameters=vocab * config.width,
        kernels=2,
        norms=1,
        traffic=2 * run.stream_bytes,
        temporary=2 * run.stream_bytes,
        weight_gradient=_weights(run, vocab * config.width),
    )
    return Layer(name="embed", parts=(table,))


def _head(run: Run) -> Layer:
    """The last norm, the projection to the vocabulary and the loss."""
    config, tokens, b = run.config, run.tokens, run.element_bytes
    vocab, stream = -(-config.vocab // run.layout.tp), run.stream_bytes
    if run.framework.keeps_logits:
        saved = stream + tokens * b * vocab
        temporary = stream + _weights(run, vocab * config.width)
    else:  # gradients of the input and, in float32, of the weight; backward casts and scales both
        saved = stream + 4 * vocab * config.width
        temporary = stream + b * vocab * config.width
    projection = Part(
        name="head",
        pieces=(Piece(saved + _INDEX * run.local_tokens, HELD),),
        parameters=0 if config.tied and run.layout.pp == 1 else vocab * config.width,
        products=(Product(tokens, vocab, config.width),),
        kernels=4,
        traffic=2 * b * tokens * vocab,
        temporary=temporary,
        gathers=_gathers(run)[:1],
    )
    norm = Part(
        name="norm",
        pieces=(Piece(stream, HELD),),
        parameters=config.width,
        kernels=1,
        norms=1,
        traffic=2 * stream,
        temporary=2 * stream,
    )
    return Layer(name="head", parts=(norm, projection))
