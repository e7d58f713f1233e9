"""A profile that is measured while layers are recomputed is that of the step that keeps all."""

from functools import cache

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import predict
from pagestash.planning.budget import base_bytes


class Keywords(nn.Module):
    """A layer that is given tensors by name, drops out, and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x, *, scale, name):
        assert name == "a layer"
        h = torch.nn.functional.dropout(torch.nn.functional.gelu(self.up(self.norm(x))), 0.3)
        return x + scale * self.down(h), {"auxiliary": h.mean(), "name": name}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Keywords() for _ in range(4)), nn.Linear(64, 64)

    def forward(self, x):
        auxiliary, scale = 0.0, torch.full((64,), 0.5)
        for layer in self.layers:
            x, more = layer(x, scale=scale, name="a layer")
            auxiliary = auxiliary + more["auxiliary"]
        return self.head(x).square().mean() + auxiliary


def decoder():
    model = Decoder(preset("tiny", layers=4))
    model.initialise(0)
    tokens = torch.randint(0, 256, (2, 129), generator=torch.Generator().manual_seed(0))
    return model, (tokens[:, :-1], tokens[:, 1:])


def keywords():
    torch.manual_seed(0)
    return Net(), torch.randn(8, 32, 64)


@cache
def profiles(build):
    model, batch = build()
    return [ps.profile(model, batch, repeats=1, measure=way) for way in ("whole", "recompute")]


RULES = {
    "nothing": [],
    "layers": [ps.Rule("layers.*", "recompute")],
    "parts": [ps.Rule("layers.{0,2}.*", "recompute")],
    "offload": [ps.Rule("layers.*.*", "offload", min_bytes=1)],
    "stash": [ps.Rule("layers.*.*", "stash", min_bytes=1)],
}


@pytest.mark.parametrize("build", [decoder, keywords])
@pytest.mark.parametrize("rules", RULES)
def test_predicted_peaks_are_those_of_a_profile_of_the_whole_step(build, rules):
    whole, recomputed = (
        predict(own, ps.Policy(RULES[rules]), base_bytes=base_bytes(own, 0)).peak_bytes
        for own in profiles(build)
    )
    assert recomputed == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("build", [decoder, keywords])
def test_it_has_the_same_tensors_regions_and_forward(build):
    whole, recomputed = profiles(build)
    assert (whole.recomputed_layers, recomputed.recomputed_layers) == (0, 4)
    assert recomputed.total_bytes == whole.total_bytes
    assert [region.name for region in recomputed.regions] == [region.name for region in whole.regions]
    for one, other in zip(recomputed.tensors, whole.tensors, strict=True):
        assert (one.path, one.shape, one.kind) == (other.path, other.shape, other.kind)
        assert set(one.held_by) == set(other.held_by)


def test_it_can_be_saved(tmp_path):
    _, recomputed = profiles(decoder)
    recomputed.save(tmp_path / "profile.json")
    assert ps.Profile.load(tmp_path / "profile.json") == recomputed


def test_its_time_is_that_of_the_whole_step_without_replays():
    whole, recomputed = profiles(decoder)
    assert 0.4 * whole.plain_seconds < recomputed.plain_seconds < 2.5 * whole.plain_seconds


@pytest.mark.parametrize("build", [decoder, keywords])
def test_the_model_is_left_as_it_was(build):
    model, batch = build()
    before = torch.get_rng_state()
    named = {name: dict(vars(module)) for name, module in model.named_modules()}
    ps.profile(model, batch, repeats=1, measure="recompute")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same([torch.get_rng_state()], [before])
    for name, module in model.named_modules():
        assert vars(module).keys() == named[name].keys()
        assert not module._forward_hooks


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layers to recompute"):
        ps.profile(nn.Linear(8, 8), torch.randn(2, 8), measure="recompute")
