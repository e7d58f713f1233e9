"""Recompute of Hugging Face's layers: a KV cache, and PEFT's parametrized experts."""

import pytest
import torch
from support import same

import pagestash as ps

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def qwen(**settings):
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        **settings,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).train()


def gradients(model, *rules, **arguments):
    keeper = ps.Keeper(ps.Policy([ps.Rule(match, "recompute") for match in rules])).attach(model)
    for _ in range(2):
        model.zero_grad()
        with keeper.step():
            model(input_ids=IDS, labels=IDS, **arguments).loss.backward()
    keeper.detach()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("rule", ["model.layers.*", "model.layers.*.self_attn"])
def test_a_kv_cache_is_refused_and_not_doubled(rule):
    model = qwen()
    assert model.config.use_cache, "the default of the library"
    with pytest.raises(
        RuntimeError, match=r"region 'model.layers.0.*changes its argument a DynamicCache.*use_cache=False"
    ):
        gradients(model, rule)
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(RuntimeError, match="use_cache=False"):
        gradients(model, rule, past_key_values=cache)
    assert cache.get_seq_length(0) == IDS.shape[1]
    plain = gradients(model, use_cache=False)
    assert same(gradients(model, rule, use_cache=False), plain)
    model.config.use_cache = False
    assert same(gradients(model, rule), plain)


def test_layers_without_the_cache_may_be_run_again():
    """The experts take none, so that its default harms nobody."""
    model = qwen()
    assert same(gradients(model, "model.layers.*.mlp"), gradients(model))


def with_adapters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(qwen(use_cache=False), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


@pytest.mark.parametrize("rule", ["**.mlp.experts", "**.mlp", "**.layers.*"])
def test_experts_with_adapters_are_run_again(rule):
    assert same(gradients(with_adapters(), rule), gradients(with_adapters()))


def test_experts_inside_their_adapters_are_refused():
    with pytest.raises(RuntimeError, match=r"gone in backward.*PEFT's target_parameters.*module around it"):
        gradients(with_adapters(), "**.mlp.experts.base_layer.base_layer")
