"""Presets have the published shapes, and say what is wrong with a change to them."""

import pytest

from pagestash.models import PRESETS, Decoder, count_parameters, preset

PUBLISHED = {
    "qwen3-30b-a3b": 30.5e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
    "gpt-oss-20b": 20.9e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    total, _ = count_parameters(PRESETS[name])
    assert total == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_token_of_qwen3_meets_as_many_parameters_as_published():
    # 3.353e9, published with two digits as 3.3e9.
    _, active = count_parameters(PRESETS["qwen3-30b-a3b"])
    assert active == pytest.approx(3.35e9, rel=0.002)


def test_a_token_of_deepseek_v3_meets_as_many_parameters_as_published():
    # The published 37e9 leaves out the embedding, which a token reads one row of.
    config = PRESETS["deepseek-v3"]
    _, active = count_parameters(config)
    assert round((active - config.vocab * config.width) / 1e9) == 37


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layers", [1, 4])
def test_a_cut_preset_has_its_layers_and_one_with_experts_at_least(name, layers):
    model = Decoder(preset(name, layers=layers), device="meta")
    assert len(model.layers) == layers
    assert model.layers[-1].moe is not None
    names = {name for name, _ in model.named_modules()}
    last = f"layers.{layers - 1}"
    for part in ("attn_norm", "attn.qkv_linear", "attn.core_attn", "attn.attn_proj", "mlp_norm"):
        assert f"{last}.{part}" in names
    assert {f"{last}.moe.router", f"{last}.moe.experts"} <= names


def test_first_layers_are_dense():
    model = Decoder(preset("deepseek-v3", layers=5), device="meta")
    assert [layer.moe is None for layer in model.layers] == [True] * 3 + [False] * 2
    assert [layer.mlp is None for layer in model.layers] == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "qwen3-30b"}, "unknown preset 'qwen3-30b'; did you mean 'qwen3-30b-a3b'"),
        ({"name": "large"}, "unknown preset 'large'; expected one of tiny, qwen3"),
        ({"name": "tiny", "layers": 0}, "layers=0"),
        ({"name": "tiny", "expert": 3}, "unknown key 'expert'; did you mean 'experts'"),
        ({"name": "tiny", "top_k": 9}, "top_k=9: there are only experts=8"),
        ({"name": "tiny", "kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"name": "tiny", "heads": 3, "kv_heads": 0}, "heads=3 does not divide width=128"),
        ({"name": "tiny", "head_dim": 7}, "expected an even number"),
        ({"name": "tiny", "attention": "flash"}, "expected 'gqa' or 'mla'"),
        ({"name": "tiny", "attention": "mla"}, "kv_rank=0: latent attention needs"),
        ({"name": "tiny", "dense_layers": 9}, "dense_layers=9"),
        ({"name": "tiny", "dense_width": 0}, "dense_width=0"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        preset(**arguments)
