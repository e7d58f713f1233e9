"""torchtitan's debug models, cut to what a CPU trains in a second a step, and what they read."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.protocols.module import Module


def fill(seed):
    """Sets a weight's values by the number alone: stock's parameters and ours have other layouts."""

    def fill_(weight):
        drawn = torch.empty(weight.shape).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
        if hasattr(weight, "to_local"):
            drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
        weight.data.copy_(drawn)

    return fill_


def cut(config, layers=4, experts=8, hidden=64):
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    for layer in model.layers:
        moe = layer.moe
        if moe is None:
            continue
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = experts
        routed = moe.routed_experts
        routed.inner_experts.num_experts = routed.token_dispatcher.num_experts = experts
        routed.inner_experts.hidden_dim = hidden
        names = routed.inner_experts.param_init
        routed.inner_experts.param_init = {name: fill(number) for number, name in enumerate(sorted(names))}
        moe.router.top_k = routed.token_dispatcher.top_k = 2
        if moe.router.num_expert_groups:
            moe.router.num_expert_groups, moe.router.num_limited_groups = 2, 1
    return config


def qwen3():
    return cut(qwen3_moe_debug())


def still():
    """At a rate of 0 weights stay as they are loaded."""
    config = qwen3()
    config.optimizer = default_adamw(lr=0.0)
    return config


def deepseek():
    return cut(deepseek_v3_debugmodel())


def gptoss():
    config = cut(gpt_oss_debugmodel())
    config.validator.enable = False
    return config


@override(target=FlexAttention.Config, description="flex needs a compiler")
def sdpa(cfg):
    return derive(cfg, ScaledDotProductAttention.Config)


class MathAttention(Module):
    """Causal attention in torch operators, with the log-sum-exp that gpt-oss's sinks need."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config):
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, out_transform=None, **_):
        times = q_BLNH.shape[2] // k_BLNH.shape[2]
        k_BLNH, v_BLNH = (each.repeat_interleave(times, dim=2) for each in (k_BLNH, v_BLNH))
        scores = torch.einsum("blnh,bmnh->bnlm", q_BLNH, k_BLNH) * scale
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        lse = scores.logsumexp(-1).transpose(1, 2)
        out = torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v_BLNH)
        return out if out_transform is None else out_transform(out, lse)


@override(target=VarlenAttention.Config, description="flash attention is for GPUs")
def math_attention(cfg):
    return derive(cfg, MathAttention.Config)


def assets(folder: Path) -> None:
    """A tokenizer of bytes and some text, where the debug configs look for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    place = folder / "tests" / "assets" / "tokenizer"
    place.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(letters)} | {"</s>": 256}, [])
    )
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    words.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "add_eos_token": True}))
    text = folder / "tests" / "assets" / "c4_test"
    text.mkdir()
    lines = (json.dumps({"text": f"{number} times {number} is {number**2}. " * 20}) for number in range(200))
    (text / "data.json").write_text("\n".join(lines))
