"""Names of modules: as the model's author knows them, whatever stands around it."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pagestash as ps
from pagestash.saved.names import named_modules, plain_names


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


NAMES = ["layers", *(f"layers.{i}{part}" for i in range(2) for part in ("", ".0", ".1"))]


def test_a_plain_model_has_its_own_names():
    assert list(named_modules(Model())) == NAMES


def test_wrappers_add_nothing_and_stand_for_what_they_wrap():
    model = Model()
    first = model.layers[0]
    model.layers[0] = checkpoint_wrapper(first)
    whole = torch.compile(model)
    assert list(named_modules(whole)) == NAMES
    assert named_modules(whole)["layers.0"] is model.layers[0]
    assert [module for name, module in plain_names(whole) if name == "layers.0"] == [model.layers[0], first]


def wrapper(*children):
    made, model = nn.Module(), Model()
    for child in children:
        made.add_module(child, model)
    return made


@pytest.mark.parametrize("children", [("module",), ("_forward_module", "_original_module")])
def test_wrappers_of_frameworks_and_users_add_nothing(children):
    """`module` is the only child of DDP, of Megatron's and DeepSpeed's wrappers; the other is Fabric's."""
    assert list(named_modules(wrapper(*children))) == NAMES


def test_inside_a_model_a_child_called_module_keeps_its_name():
    """There it is no wrapper of the whole, and a rule may be for it alone."""
    inside = list(named_modules(nn.Sequential(wrapper("module"), nn.Identity())))
    assert inside == ["0", "0.module", *(f"0.module.{name}" for name in NAMES), "1"]


def test_a_module_beside_others_is_no_wrapper():
    model = wrapper("module")
    model.add_module("head", nn.Identity())
    assert list(named_modules(model)) == ["module", *(f"module.{name}" for name in NAMES), "head"]


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["layers.0.0"]))


def test_adapters_around_a_model_add_nothing_and_a_layer_inside_one_keeps_a_name():
    found = named_modules(adapted())
    assert set(found) >= {*NAMES, "layers.0.0.base_layer", "layers.0.0.lora_A.default"}
    assert not [name for name in found if name.startswith("base_model")]
    assert type(found["layers.0.0.base_layer"]) is nn.Linear
    assert type(found["layers.0.0"]) is not nn.Linear


def test_what_is_inside_an_adapted_layer_has_the_name_that_it_had():
    model = adapted()
    model.base_model.model.layers[0][0].base_layer.add_module("part", nn.Identity())
    assert "layers.0.0.part" in named_modules(model)


def test_a_policy_of_the_model_holds_for_it_with_adapters():
    model = adapted()
    keeper = ps.Keeper(ps.Policy(rules=[ps.Rule("layers.*", "stash")])).attach(model)
    with keeper.step():
        model(torch.randn(3, 4)).sum().backward()
    assert {"layers.0", "layers.1"} <= set(keeper.stats().regions)
