"""The formulas for a layer's costs agree with the layers."""

import pytest
import torch

from pagestash.models import Decoder, count_parameters, preset
from pagestash.models.costs import layer_costs

SMALL = {
    "tiny": {},
    "qwen3-30b-a3b": {"layers": 2, "vocab": 512, "width": 128, "heads": 4, "kv_heads": 2, "head_dim": 32,
                      "experts": 8, "top_k": 4, "expert_width": 64},
}  # fmt: skip


def saved_by_layer(model, tokens):
    """Bytes of storage that autograd keeps, by the layer that saved them first; weights are not counted."""
    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    seen, found, here = {}, {}, ["embed"]

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own | seen.keys():
            seen[storage.data_ptr()] = tensor
            found[here[0]] = found.get(here[0], 0) + storage.nbytes()
        return tensor

    def at(name):
        return lambda *_: here.__setitem__(0, name)

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(at(f"layers.{index}"))
    model.norm.register_forward_pre_hook(at("head"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_activations_are_what_a_layer_saves(name):
    config = preset(name, **SMALL[name])
    model = Decoder(config)
    model.initialise(0)
    tokens = torch.randint(config.vocab, (2, 256))
    saved = saved_by_layer(model, tokens)
    costs = layer_costs(config, tokens=512, sequence=256, element_bytes=4)
    # Without a kernel of its own, as on a CPU, a norm keeps what it scaled and what came of it beside its input.
    norms = 2 * config.width + (config.heads + config.kv_heads) * config.head_size
    extra = dict.fromkeys(saved, 512 * 4 * norms) | {"embed": 0, "head": 512 * 4 * config.width}
    for cost in costs:
        assert saved[cost.name] == pytest.approx(cost.activations + extra[cost.name], rel=0.02), cost.name


@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b"])
def test_parameters_are_the_models(name):
    config = preset(name)
    costs = layer_costs(config, tokens=4096, sequence=1)
    total, met = count_parameters(config)
    assert sum(cost.parameters for cost in costs) == 16 * total
    # Two operations a parameter and token; the embedding is looked up. Sequences of one have hardly any scores.
    products = 2 * 4096 * (met - 2 * config.vocab * config.width) / 1e12
    assert sum(cost.forward for cost in costs[:-1]) == pytest.approx(products, rel=0.01)
    longer = layer_costs(config, tokens=4096)
    assert longer[1].forward > costs[1].forward
    assert all(cost.backward == 2 * cost.forward for cost in costs[:-1])
    assert costs[-1].forward == pytest.approx(6 * 4096 * config.vocab * config.width / 1e12)


def test_ranks_of_a_stage_share_parameters_and_send_rows():
    config = preset("tiny")
    alone = layer_costs(config, tokens=64)
    shared = layer_costs(config, tokens=64, shards=4, expert_parallel=2)
    for one, four in zip(alone, shared, strict=True):
        assert four.parameters == one.parameters // 4
    rows = 64 * 2 * config.width * config.top_k
    assert shared[-2].activations == alone[-2].activations + rows
    assert shared[1].activations == alone[1].activations  # a dense layer


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tokens": 0}, "tokens=0: expected at least 1"),
        ({"tokens": 10, "sequence": 4}, "sequence=4 does not divide the 10 tokens"),
        ({"tokens": 8, "expert_parallel": 3, "shards": 3}, "expert_parallel=3 does not divide 8 experts"),
        ({"tokens": 8, "expert_parallel": 2}, "and 1 ranks a stage"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        layer_costs(preset("tiny"), **given)
