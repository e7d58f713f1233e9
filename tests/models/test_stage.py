"""Stages are the decoder in parts: the same names, values, losses and gradients."""

import pytest
import torch

from pagestash.models import Decoder, preset

PARTS = {
    "three": [["embed", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "head"]],
    "ends alone": [["embed"], ["layers.0", "layers.1", "layers.2", "layers.3"], ["head"]],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_stages_together_are_the_decoder_to_the_last_bit(parts):
    config = preset(
        "tiny", width=32, heads=2, kv_heads=1, dense_width=32, experts=4, expert_width=16, vocab=64
    )
    whole, stages = Decoder(config), [Decoder(config, part=names) for names in parts]
    for model in (whole, *stages):
        model.initialise(3)
    tokens = torch.randint(64, (2, 17))
    loss, aux = whole(tokens[:, :-1], tokens[:, 1:])
    assert aux > 0
    (loss + aux).backward()
    x = tokens[:, :-1]
    for stage in stages[:-1]:
        x = stage(x)
    last = stages[-1](x, tokens[:, 1:])
    last.backward()
    assert torch.equal(last, loss)
    expected = dict(whole.named_parameters())
    found = {name: value for stage in stages for name, value in stage.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(found[name].grad, value.grad), name


@pytest.mark.parametrize("names", [[], ["layers.0", "layers.2"], ["layers.2", "layers.1"], ["tail"]])
def test_a_stage_is_contiguous(names):
    with pytest.raises(ValueError, match="contiguous part"):
        Decoder(preset("tiny"), part=names, device="meta")
