"""Expected rows that a stash rule's `fraction` offloads: a profile and a plan count what a keeper moves."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.planning import predict
from pagestash.simulation.model.homes import PolicyHomes

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, DEPTH = 128, 64, 4, 2, 512, 6
ROWS, EXPECTED = TOKENS * TOP_K, 768  # whole blocks: a profile counts storages
HEADS = (EXPECTED * WIDTH * 4, EXPECTED * 2 * INNER * 4)


class Loopback:
    """A dispatch of one rank, whose buffers have room for four times the rows that arrive."""

    experts = EXPERTS

    def send(self, x, ids, weights, over):
        return Received(x, weights, ids, route(ids, EXPERTS, capacity=4 * ROWS, over=over), EXPECTED)

    def collect(self, slots, received):
        return slots


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MoEConfig(width=WIDTH, expert_width=INNER, experts=EXPERTS, top_k=TOP_K)
        self.layers = nn.ModuleList(MoE(config, dispatch=Loopback()) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


@cache
def measured():
    return ps.profile(Stack(), torch.randn(TOKENS, WIDTH), loss=lambda out: out, repeats=1)


def policy(names=("experts",), **fields):
    fields = {"min_bytes": 65536, **fields}
    return ps.Policy([ps.Rule(f"layers.*.{name}", "stash", **fields) for name in names])


def moved_by_keeper(found):
    model = Stack()
    keeper = ps.Keeper(found, backend="torch").attach(model)
    for _ in range(2):
        keeper.reset_peaks()
        with keeper.step():
            model(torch.randn(TOKENS, WIDTH)).backward()
    return keeper.stats().homes["offload"].peak


@pytest.mark.parametrize("names", [("experts",), ("expert_fc1", "moe_act"), ("expert_fc1",)])
@pytest.mark.parametrize("prefetch", [0, None])
def test_fits_counts_what_a_keeper_moves(names, prefetch):
    found = policy(names, fraction=1.0, prefetch_bytes=prefetch)
    assert measured().fits(found).moved_bytes == moved_by_keeper(found) > 0


def test_fits_finds_the_fraction_with_which_their_copies_hide():
    profile = measured()
    slow = replace(profile, link=replace(profile.link, out=1e10, back=1e10), segments=even(profile.segments))
    found = slow.fits(policy(fraction=1.0, prefetch_bytes=0))
    assert not found.fits
    assert 0 < found.fraction < 1
    assert slow.fits(policy(fraction=found.fraction, prefetch_bytes=0)).fits
    assert not slow.fits(policy(fraction=found.fraction + 0.01, prefetch_bytes=0)).fits


def even(segments):
    """As long as each other: what was measured on a CPU varies."""
    return [replace(segment, seconds=1e-3) for segment in segments]


def test_without_a_fraction_nothing_moves():
    assert measured().fits(policy()).moved_bytes == 0
    assert measured().home_bytes(policy())["offload"] == 0


def test_a_profile_tells_expected_rows_from_the_others():
    plain, leaving = measured().home_bytes(policy()), measured().home_bytes(policy(fraction=0.5))
    found = {home: leaving[home] - plain[home] for home in plain}
    assert found == {"keep": 0, "stash": -found["offload"], "offload": found["offload"], "recompute": 0}
    assert found["offload"] == DEPTH * sum(HEADS)


def test_a_prediction_takes_them_off_the_device_and_leaves_the_pool_as_it_is():
    plain = predict(measured(), policy())
    leaving = predict(measured(), policy(fraction=1.0, prefetch_bytes=0))
    assert leaving.pool == plain.pool
    assert plain.moved_bytes == plain.host_bytes == 0
    assert leaving.moved_bytes == moved_by_keeper(policy(fraction=1.0, prefetch_bytes=0))
    assert leaving.host_bytes == leaving.moved_bytes == (DEPTH - 1) * sum(HEADS)
    assert plain.held_bytes["keep"] - leaving.held_bytes["keep"] >= DEPTH * sum(HEADS)
    end = max(range(len(plain.starts)), key=lambda at: plain.memory["keep"][at])
    fall = sum(plain.memory[home][end] - leaving.memory[home][end] for home in ("keep", "offload", "stash"))
    assert fall >= 0.99 * leaving.moved_bytes


def test_simulated_layers_have_no_expected_rows():
    with pytest.raises(ValueError, match=r"rule 'layers\.\*\.experts': fraction=0\.5 with home='stash'"):
        PolicyHomes(policy(fraction=0.5))
    PolicyHomes(policy())
