"""Tiny models of transformers, of random weights, one for each family."""

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

FAMILIES = {
    "Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3": ("DeepseekV3", {**ROUTED, **LATENT, "num_key_value_heads": 4, "rope_interleave": True}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "GLM-4-MoE": ("Glm4Moe", {**ROUTED, "head_dim": 8, "n_group": 1, "topk_group": 1}),
    "MiniMax": (
        "MiniMax",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 4},
    ),
    "Gemma4": (
        "Gemma4Text",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
NEWER = {
    "DeepSeek-V4": (
        "DeepseekV4",
        {
            **ROUTED,
            **INDEXED,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 2,
            "mlp_layer_types": ["moe"] * 2,
            "swiglu_limit": 0.2,
        },
    ),
    "HY-V4": (
        "HYV4",
        {**ROUTED, **LATENT, **INDEXED, "hc_mult": 2, "swiglu_limit": 0.2, "mlp_layer_types": ["sparse"] * 2},
    ),
    "MiniMax-M3": (
        "MiniMaxM3VLText",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "head_dim": 8,
            "rotary_dim": 4,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.2,
        },
    ),
    "Nemotron-H": (
        "NemotronH",
        {
            **ROUTED,
            "head_dim": 8,
            "layers_block_type": ["attention", "moe"],
            "moe_shared_expert_intermediate_size": 16,
            "n_groups": 1,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "use_mamba_kernels": False,
        },
    ),
}
NEWER |= {
    "exact gelu": ("Qwen3Moe", {**FAMILIES["Qwen3-MoE"][1], "hidden_act": "gelu"}),
    "gpt-oss, other limits": FAMILIES["gpt-oss"],
}
ROUTED_OTHERWISE = {
    "HunYuan": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "Jamba": (
        "Jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "use_mamba_kernels": False,
        },
    ),
}
"""Families without a class `...Router`."""
NEWER = {family: made for family, made in NEWER.items() if hasattr(transformers, f"{made[0]}Config")}
"""Families whose activation has limits that are met, or no gate. Not all versions of transformers have them."""


def tiny(family, *, experts="eager", attention="eager", dtype=torch.float32, **changes):
    """A model of `family`, the same weights each time."""
    name, options = {**FAMILIES, **NEWER, **ROUTED_OTHERWISE}[family]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options, **changes})
    config._attn_implementation, config._experts_implementation = attention, experts
    torch.manual_seed(0)
    kind = name.removesuffix("Text")
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for module in model.modules():
        if family == "gpt-oss, other limits" and hasattr(module, "limit"):  # its config has none before 5.22
            module.alpha, module.limit = 1.3, 0.2
    with torch.no_grad():
        for parameter in model.parameters():  # routers and biases start as zeros, norms as ones
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.5))
    return model.to(dtype).train()


def batch(tokens=11, sequences=2, seed=1):
    torch.manual_seed(seed)
    ids = torch.randint(3, 96, (sequences, tokens))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model):
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def as_it_is(model):
    """All that a refusal must leave alone: modules, what hangs on them, attributes, parameters and their bits."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_state_dict_hooks")
    modules = [
        (
            name,
            type(module),
            sorted(set(module.__dict__) - {"_pagestash_experts"}),  # which any call makes
            [list(getattr(module, each)) for each in hooks],
            module.__dict__.get("forward"),
            getattr(module, "recomputes", None),
            getattr(module, "pool", None),
        )
        for name, module in model.named_modules()
    ]
    bits = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return modules, bits
