"""Models from presets, Hugging Face configurations and tables; modules whose bytes are the formulas'."""

import json

import pytest
from support.simulated import one_batch

from pagestash.models.config import PRESETS
from pagestash.models.costs import layer_costs
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.model.framework import FRAMEWORKS, framework
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.read import read_model

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
}


def sizes(config, ep=1, **layout):
    shape = one_batch(config, Layout(devices=ep, ep=ep, **layout), sequence=512, microbatch=2)
    return [(layer.saved, layer.parameters) for layer in layers_of(shape)]


@pytest.mark.parametrize(
    ("table", "preset"), [(QWEN, "qwen3-30b-a3b"), (DEEPSEEK, "deepseek-v3"), (GPT_OSS, "gpt-oss-20b")]
)
def test_a_huggingface_configuration_has_the_presets_bytes_and_parameters(table, preset, tmp_path):
    assert sizes(read_model(table)) == sizes(PRESETS[preset])
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == read_model(table)


def test_layers_that_predict_further_tokens_are_read_from_a_huggingface_configuration():
    assert read_model(DEEPSEEK).mtp_layers == 0
    assert read_model(DEEPSEEK | {"num_nextn_predict_layers": 1}).mtp_layers == 1


def test_mixtral_has_its_published_parameters():
    total = sum(parameters for _, parameters in sizes(read_model(MIXTRAL)))
    assert total == 46_702_792_704


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ep", [1, 2])
def test_modules_sum_to_the_formulas_of_a_layer(preset, ep):
    config = PRESETS[preset]
    costs = layer_costs(config, tokens=1024, sequence=512, parameter_bytes=1, expert_parallel=ep, shards=ep)
    for (saved, parameters), cost in zip(sizes(config, ep), costs):
        assert saved == cost.activations
        if ep == 1:
            assert parameters == cost.parameters
    shape = one_batch(config, Layout(devices=1), sequence=512, microbatch=2)
    forward = [layer.operations / 1e12 for layer in layers_of(shape)]
    assert forward[1:-1] == pytest.approx([cost.forward for cost in costs[1:-1]], rel=2e-3)


def test_tensor_and_context_parallel_ranks_share_what_one_rank_saves():
    config = PRESETS["qwen3-30b-a3b"]
    one, *others = (
        sum(layer.saved for layer in layers_of(one_batch(config, layout, sequence=4096))[1:-1])
        for layout in (Layout(devices=4), Layout(devices=4, tp=4), Layout(devices=4, cp=4))
    )
    assert [4 * other for other in others] == [one, one]


def test_frameworks_keep_more_than_we_do():
    config = PRESETS["qwen3-30b-a3b"]
    layout = Layout(devices=8, ep=8)
    found = {
        name: layers_of(one_batch(config, layout, sequence=4096, framework=frame))[1].saved
        for name, frame in FRAMEWORKS.items()
    }
    rows, d, n = 4096 * 8, 2048, 768
    assert found["megatron"] - found["pagestash"] == 2 * rows * n
    assert found["pith"] - found["pagestash"] == 2 * rows * (2 * n + d)
    with pytest.raises(ValueError, match="unknown framework 'colossal'"):
        framework("colossal")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"model_type": "llama", "hidden_size": 1}, "model_type='llama': expected one of"),
        (QWEN | {"num_experts": None}, "num_experts is missing"),
        (QWEN | {"num_experts": "many"}, "num_experts='many': expected a whole number"),
        (QWEN | {"mlp_only_layers": [0]}, "alternate, which is not supported"),
        (QWEN | {"num_experts_per_tok": 256}, "top_k=256"),
        ({"width": 8, "color": "red"}, "unknown key 'color'"),
        ({"width": 8}, "missing"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_sentence(table, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        read_model(table)
    assert "\n" not in str(error.value)


def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    for text, sentence in (("gpt-5", "expected one of tiny"), (tmp_path / "no.json", "No such file")):
        with pytest.raises(ValueError, match=sentence):
            read_model(text)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected the table"):
        read_model(tmp_path / "list.json")


def test_a_table_of_ones_own_is_a_model(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text("vocab=64\nwidth=32\nlayers=4\nheads=4\nexperts=8\ntop_k=2\nexpert_width=16\n")
    assert read_model(path).experts == 8
    assert read_model(path, layers=2).layers == 2
