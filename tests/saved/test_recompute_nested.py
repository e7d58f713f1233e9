"""Recomputed regions in chains, inside each other, and beside regions of other homes."""

import pytest
from recomputed import MLP, ROWS, WIDTH, Layer, Square, X, empty, keep, step
from support import same
from torch import nn

import pagestash as ps

pytestmark = pytest.mark.usefixtures("no_collector")


def test_a_chain_of_light_regions_holds_the_first_input_alone():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Square())
    plain = step(model, X)
    keeper = keep(model, "0", "1")
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert keeper.stats().homes["keep"].bytes == x.nbytes
        loss.backward()
    assert same(step(model, X, keeper), plain)
    assert empty(keeper)


def test_what_is_kept_anyway_is_not_made_again():
    model = nn.Sequential(MLP(), Square(), Square())
    model[1].forward = lambda x: (x.square(), x)
    model[2].forward = lambda pair: pair[0] * pair[1].sin()
    plain = step(model, X)
    model[0].forwards = 0
    keeper = keep(model, "0", ps.Rule("1", "keep"))
    assert same(step(model, X, keeper), plain)
    assert model[0].forwards == 2
    assert keeper.stats().homes["recompute"].peak == 4 * ROWS * (64 + 64), "h and the activation, no output"


def test_layers_hold_their_inputs_and_run_once_more_each():
    """Else the last layer's backward would run all the layers before it."""
    model = nn.Sequential(*(MLP(inner=8 * WIDTH) for _ in range(4)))
    keeper = keep(model, "*")
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert keeper.stats().homes["keep"].bytes == 4 * x.nbytes
        loss.backward()
    assert [layer.forwards for layer in model] == [2] * 4


@pytest.mark.parametrize(
    "rules",
    [
        [ps.Rule("*", "recompute"), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("*", "recompute"), ps.Rule("*.mlp", "stash", min_bytes=16)],
        [ps.Rule("*", "recompute"), ps.Rule("*.mlp", "keep")],
        [ps.Rule("*", "stash", min_bytes=16), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("*.norm", "recompute"), ps.Rule("*.mlp", "stash", min_bytes=16)],
        [ps.Rule("*.norm", "recompute"), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("*", "stash", min_bytes=16), ps.Rule("*.norm", "recompute"), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("**", "recompute")],
        [ps.Rule("*", "recompute", min_bytes=1024)],
    ],
    ids=lambda rules: " ".join(f"{rule.match}={rule.home}" for rule in rules),
)
def test_regions_inside_and_beside_each_other(rules):
    model = nn.Sequential(Layer(), Layer())
    plain = step(model, X)
    keeper = keep(model, *rules)
    for _ in range(3):
        assert same(step(model, X, keeper), plain)
    assert empty(keeper)


def test_an_inner_region_of_another_home_is_taken_once():
    model = nn.Sequential(Layer())
    keeper = keep(model, "0", ps.Rule("0.mlp", "stash", min_bytes=16))
    step(model, X, keeper)
    keeper.reset_peaks()
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).square().sum()
        stashed = keeper.stats().homes["stash"].bytes
        # The region's input (the norm's output), h, and the activation.
        assert stashed == 4 * ROWS * (WIDTH + 64 + 64)
        loss.backward()
    assert keeper.stats().homes["stash"].peak == stashed


def test_a_stretch_of_another_home_inside_a_region():
    class Opens(nn.Module):
        def forward(self, x):
            with ps.region("part"):
                y = x.sin().cos()
            return y.exp().tanh()

    model = nn.Sequential(Opens(), Square())
    plain = step(model, X)
    policy = ps.Policy([ps.Rule("0", "recompute"), ps.Rule("0.part", "stash", min_bytes=16)])
    keeper = ps.Keeper(policy, backend="torch").attach(model, regions=["0.part"])
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    assert keeper.stats().homes["stash"].peak == X.nbytes  # the cosine's input; the sine's is the region's
    assert empty(keeper)


def test_an_input_is_let_go_when_nobody_can_ask_for_the_output():
    model = nn.Sequential(Square(), nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    keeper = keep(model, "1")
    x = X.clone().requires_grad_()
    with keeper.step():
        losses = [model(x).sum() for _ in range(2)]
        assert model[0].alive() == [False, True]
        del losses
    assert not any(model[0].alive())


def test_the_input_waits_in_the_home_of_the_region_around():
    model = nn.Sequential(nn.Sequential(nn.Tanh(), MLP()))
    keeper = keep(model, ps.Rule("0", "stash", min_bytes=16), "0.1")
    plain = step(model, X)
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    keeper.reset_peaks()
    assert same(step(model, X, keeper), plain)
    # tanh's output, which is also the MLP's input.
    assert keeper.stats().homes["stash"].peak == X.nbytes


def test_a_module_that_recomputes_by_itself_is_told_to():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on = None

        def use_recompute(self, on):
            self.on = on

        def forward(self, x):
            return x.sin().cos()

    model = nn.Sequential(Own(), nn.Sequential(Own()))
    keeper = keep(model, "0", "1.0")
    assert model[0].on is True
    assert model[1][0].on is True
    plain = step(model, X)
    assert same(step(model, X, keeper), plain)
    keeper.detach()
    assert model[0].on is False
    # Inside another region that is run again it is run with that one.
    model[1][0].on = None
    keep(model, "**")
    assert model[1][0].on is None
