"""Kinds of layers that only a simulation has, and what Megatron-LM's checkpoints hold and repeat."""

from dataclasses import replace

import pytest
from support.simulated import one_batch

from pagestash.models.config import preset
from pagestash.models.decoder import Decoder
from pagestash.simulation.cluster.cluster import load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.build import rank_peaks, step_costs
from pagestash.simulation.model.framework import FRAMEWORKS
from pagestash.simulation.model.homes import MegatronHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.read import read_model
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.replay import replay

QWEN = preset("qwen3-30b-a3b", layers=4)
MLA = preset("deepseek-v3", layers=4)
MIB = 2**20


def shape(config, **changes):
    return one_batch(config, Layout(devices=1), sequence=4096, **changes)


def core(layer):
    return next(part for part in layer.parts if part.name == "attn.core_attn")


def run(config=QWEN, **changes):
    layout = changes.pop("layout", Layout(devices=8, ep=8))
    values = {"cluster": load_cluster("h100", layout.devices), "framework": FRAMEWORKS["megatron"]}
    return Run(config=config, layout=layout, sequence=4096, global_batch=8, **values | changes)


def peak(made):
    return max(found.total for found in rank_peaks(made))


def test_a_window_is_all_that_a_token_attends_to():
    plain, windowed = (layers_of(shape(c)) for c in (QWEN, replace(QWEN, window=128)))
    per_token = core(windowed[1]).scores / core(plain[1]).scores
    assert per_token == pytest.approx(128 * (1 - 128 / 8192) / 2048)
    wide = layers_of(shape(replace(QWEN, window=1 << 20)))
    assert core(wide[1]).scores == core(plain[1]).scores


def test_full_layers_alternate_with_windows_and_alike_layers_are_the_same_parts():
    layers = layers_of(shape(replace(QWEN, window=128, full_every=2)))[1:-1]
    few, all_ = core(layers[0]).scores, core(layers[1]).scores
    assert [core(layer).scores for layer in layers] == [few, all_, few, all_]
    assert layers[0].parts is layers[2].parts
    assert few < all_


def test_a_tied_head_has_no_weight_of_its_own_unless_it_is_on_another_rank():
    for pp, saved in ((1, QWEN.vocab * QWEN.width), (2, 0)):
        plain, tied = (
            layers_of(one_batch(c, Layout(devices=pp, pp=pp), sequence=64))
            for c in (QWEN, replace(QWEN, tied=True))
        )
        assert sum(layer.parameters for layer in plain) - sum(layer.parameters for layer in tied) == saved


def test_latent_rows_are_narrow_and_cost_two_projections():
    plain, latent = (layers_of(shape(c))[1] for c in (QWEN, replace(QWEN, latent_width=512)))
    by_name = {part.name: part for part in latent.parts}
    assert by_name["moe.latent"].parameters == 2 * 2048 * 512
    fc1 = next(part for part in plain.parts if part.name == "moe.expert_fc1")
    assert by_name["moe.expert_fc1"].parameters * 4 == fc1.parameters
    wide = Layout(devices=8, ep=8)
    sent = [
        layers_of(one_batch(c, wide, sequence=4096))[1].dispatch_bytes
        for c in (QWEN, replace(QWEN, latent_width=512))
    ]
    assert sent[0] == 4 * sent[1]


@pytest.mark.parametrize("change", [{"window": 8}, {"tied": True}, {"latent_width": 8}, {"mtp_layers": 1}])
def test_a_decoder_refuses_what_only_a_simulation_has(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}=.*: a Decoder has none"):
        Decoder(preset("tiny", **change))


def test_a_configuration_says_its_windows_and_ties():
    table = {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    }
    found = read_model(table)
    assert (found.window, found.full_every, found.tied) == (128, 2, True)
    table["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types"):
        read_model(table)
    qwen = table | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 64,
        "use_sliding_window": False,
    }
    assert read_model(qwen).window == 0


def test_recompute_of_core_attention_holds_the_projection_that_values_are_a_view_of():
    more = peak(run(homes=MegatronHomes(recompute=["core_attn"]))) - peak(run())
    assert more == 4 * 36 * MIB - 4 * 4096 * 4 * 32  # a layer's queries and keys, less softmax's statistics
    latent = run(MLA)
    assert peak(replace(latent, homes=MegatronHomes(recompute=["core_attn"]))) < peak(latent)


def test_recompute_of_the_moe_layer_sends_its_rows_again():
    plain, again = run(), run(homes=MegatronHomes(recompute=["moe"]))
    assert peak(again) < peak(plain)
    sent = [
        sum(span.kind == "dispatch" for span in replay(step_costs(made)).ranks[0].spans)
        for made in (plain, again)
    ]
    assert sent[1] == 1.5 * sent[0]


def test_full_recompute_keeps_a_layers_input_alone():
    made = run(homes=MegatronHomes(full=True))
    layer = layers_of(made)[1]
    kept = [item.bytes for item in made.homes.place(layer) if item.home == "keep"]
    assert kept == [made.stream_bytes]
    costs = step_costs(made)
    stage = costs.stages[0].layers[1]
    assert stage.recompute == pytest.approx(stage.forward.total)
