"""What `fits` says is moved and stays is what a keeper moves and leaves: both ask the same window."""

from functools import cache

import pytest
import torch
from support.tiers import slow_but
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.profiling.assign import Recomputing, TensorIndex, assign_when_saved

SEQUENCE = 64
CORE = {"match": "layers.*.attn.core_attn", "home": "offload", "min_bytes": 1024}


def batch():
    tokens = torch.randint(0, 256, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


@cache
def profiled(layers=5, **changes):
    """A small decoder and its profile."""
    model = Decoder(preset("tiny", layers, **changes))
    model.initialise(0)
    return model, ps.profile(model, batch(), repeats=1)


def moved_by_a_keeper(model, policy, step, steps=2) -> tuple[int, set]:
    """Bytes that waited on the host in a step that goes by the plan, and the regions of groups that stayed."""
    keeper = ps.Keeper(policy, backend="torch").attach(model)
    for _ in range(steps):  # the first is measured
        keeper.reset_peaks()
        model.zero_grad()
        with keeper.step():
            step()
    peak = keeper.stats().homes["offload"].peak
    plan = keeper._offload.plan
    stays = set() if plan is None else {key[-2] for key in plan.stays}
    keeper.detach()
    return peak, stays


POLICIES = {
    "attention": [ps.Rule(**CORE)],
    "attention, a small window": [ps.Rule(**CORE, prefetch_bytes="4KiB")],
    "attention, a large window": [ps.Rule(**CORE, prefetch_bytes="1GiB")],
    "attention and its projection": [
        ps.Rule(**CORE, prefetch_bytes=0),
        ps.Rule("layers.*.attn.attn_proj", "offload", min_bytes=1024, prefetch_bytes=0),
    ],
    "a third of attention": [ps.Rule(**CORE, prefetch_bytes=0, fraction=0.33)],
    "two thirds of attention": [ps.Rule(**CORE, prefetch_bytes=0, fraction=0.67)],
    "attention behind recomputed norms": [
        ps.Rule(**CORE, prefetch_bytes=0),
        ps.Rule("layers.*.attn.q_norm", "recompute"),
        ps.Rule("layers.*.attn.k_norm", "recompute"),
    ],
}


@pytest.mark.parametrize("name", POLICIES)
def test_moved_and_staying_bytes_are_those_of_the_keeper(name):
    policy, (model, profile) = ps.Policy(POLICIES[name]), profiled()
    found = profile.fits(policy)
    moved, stays = moved_by_a_keeper(model, policy, lambda: sum(model(*batch())).backward())
    assert found.moved_bytes == moved
    assert (
        bool(found.staying_bytes) == bool(stays) or policy.rules[0].fraction < 1
    )  # what no rule moves stays
    assert found.moved_bytes + found.staying_bytes > 0


SEED = ("moe.expert_fc1", "moe.moe_act", "attn_norm", "mlp_norm")
LATENT = {"attention": "mla", "q_rank": 32, "kv_rank": 32, "nope_dim": 16, "rope_dim": 16, "v_dim": 16}
MODELS = {
    "two layers": {"layers": 2},
    "three layers, shared experts": {"layers": 3, "shared_experts": 1},
    "five layers, latent attention": {"layers": 5, **LATENT, "kv_heads": 0, "qk_norm": False},
}
RULES = {
    "the seed's": dict.fromkeys(SEED, 1.0),
    "the seed's, a third": dict.fromkeys(SEED, 0.33),
    "the seed's, and all that saves the experts' input": dict.fromkeys(
        (*SEED, "moe.router", "moe.shared*"), 1.0
    ),
    "the experts' input alone": {"moe.expert_fc1": 1.0},
    "the MoE layer": {"moe": 1.0},
    "the MoE layer, half": {"moe": 0.5},
    "all in it": {"moe.*": 1.0},
    "all in it, a third": {"moe.*": 0.3},
    "nothing of attention": {"attn.**": 0.0},
}


@pytest.mark.parametrize("model_name", slow_but(list(MODELS)[:2], MODELS))
@pytest.mark.parametrize("name", RULES)
def test_moved_bytes_and_rules_that_move_nothing_are_those_of_the_keeper(name, model_name, caplog):
    model, profile = profiled(**MODELS[model_name])
    there = {
        rest: part for rest, part in RULES[name].items() if "shared" not in rest or "shared" in model_name
    }
    rules = [ps.Rule(f"layers.*.{rest}", "offload", 1024, part) for rest, part in there.items()]
    found = profile.fits(ps.Policy(rules))
    with caplog.at_level("WARNING", logger="pagestash"):
        moved, _ = moved_by_a_keeper(
            model, ps.Policy(rules), lambda: sum(model(*batch())).backward(), steps=3
        )
    assert found.moved_bytes == moved
    if not moved:
        assert (found.fits, found.fraction) == (False, 0.0)
        assert found.unmoved.keys() == {rule.match for rule in rules}
    told = {rule.match for rule in rules if any(f"rule {rule.match!r}" in line for line in caplog.messages)}
    assert told <= found.unmoved.keys()
    # A keeper does not name a rule whose tensors wait with those of another.
    assert all("within the window" in found.unmoved[name] for name in found.unmoved.keys() - told)


def test_a_rule_that_moves_nothing_has_the_reason():
    _, profile = profiled(2)
    found = profile.fits("layers.*.moe.expert_fc1", min_bytes=1024)
    why = "region 'layers.1.moe.router' saves the same tensors, and keeps them; give that a rule, too"
    assert found.unmoved == {"layers.*.moe.expert_fc1": why}
    (why,) = profile.fits("layers.*.moe", min_bytes=1024).unmoved.values()
    assert why.startswith("all that it saves is within the window")
    (why,) = profile.fits("layers.*.moe").unmoved.values()
    assert why == "its largest saved tensor has 128.0 KiB, and min_bytes is 1.0 MiB"
    (why,) = profile.fits("layers.*.moe.expert_fc2").unmoved.values()
    assert why == "its regions ran, and saved nothing but weights"


def test_a_rule_for_the_moe_layer_moves_the_experts_input():
    model, profile = profiled(6)
    policy = ps.Policy([ps.Rule("layers.*.moe", "offload", 1024, prefetch_bytes=0)])
    moved, _ = moved_by_a_keeper(model, policy, lambda: sum(model(*batch())).backward())
    inputs = {
        tensor.storage: tensor.storage_bytes for tensor in profile.tensors if tensor.region.endswith("fc1")
    }
    first = {
        tensor.storage: tensor.storage_bytes for tensor in profile.tensors if tensor.region.endswith("act")
    }
    assert len(inputs) == len(first) == 5
    assert moved >= 4 * (sum(inputs.values()) + sum(first.values())) / 5
    assert moved == profile.fits(policy).moved_bytes


def test_a_tensor_that_a_later_region_keeps_is_moved_all_the_same():
    """The projection saves attention's output and keeps it, but when attention saved it nobody knew."""
    _, profile = profiled()
    policy, index = ps.Policy([ps.Rule(**CORE, prefetch_bytes=0)]), TensorIndex(profile.tensors)
    saved = [
        (tensor.storage, at_first, in_the_end)
        for tensor, at_first, in_the_end in zip(
            profile.tensors,
            assign_when_saved(policy, index, Recomputing(policy, index, profile.regions)),
            profile.homes(policy),
        )
        if tensor.region.endswith("core_attn")
    ]
    in_vain = {
        storage for storage, at_first, in_the_end in saved if (at_first, in_the_end) == ("offload", "keep")
    }
    sizes = {tensor.storage: tensor.storage_bytes for tensor in profile.tensors}
    output = 2 * SEQUENCE * 128 * 4  # as wide as the model
    assert [sizes[storage] for storage in in_vain] == [output] * 5
    # Nor the other way round: what was kept when attention saved it is not moved.
    assert not [at_first for _, at_first, in_the_end in saved if at_first == "keep" != in_the_end]


def test_an_output_that_user_code_holds_is_moved_all_the_same():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.held = nn.Linear(64, 64), None

        def forward(self, x):
            self.held = self.inner(x).exp()
            return self.held * 2.0

    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(32, 64)
    policy = ps.Policy([ps.Rule("*", "offload", min_bytes=1, prefetch_bytes=0)])
    found = ps.profile(model, x, repeats=1, loss=torch.sum).fits(policy)
    moved, _ = moved_by_a_keeper(model, policy, lambda: model(x).sum().backward())
    assert found.moved_bytes == moved > 0
