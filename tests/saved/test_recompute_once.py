"""Decisions of a recomputed region that `ps.once` takes once."""

import pytest
import torch
from recomputed import WIDTH, Routed, Square, X, empty, keep, step
from support import same
from torch import nn

import pagestash as ps

pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.mark.parametrize("home", ["keep", "stash"])
def test_decisions_are_taken_once(home):
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(WIDTH), Routed()), Square())
    plain = step(model, X)
    routed = model[0][1]
    keeper = keep(model, "0.1", ps.Rule("0", home, min_bytes=16))
    for number in range(1, 4):
        routed.routed = routed.forwards = 0
        assert same(step(model, X, keeper), plain)
        assert (routed.routed, routed.forwards) == (1, 2), number
    assert empty(keeper)
    if home == "stash":
        assert keeper.stats().homes["stash"].peak > 0


def test_once_outside_a_region_is_a_call():
    assert ps.once(lambda: 3) == 3


def test_once_inside_once_and_inside_a_region_of_another_home():
    class Inner(nn.Module):
        def forward(self, x):
            calls.append("inner")
            return x.sin()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            a = ps.once(lambda: ps.once(lambda: self.inner(x)) * 2)
            b = self.inner(ps.once(lambda: x.cos()))
            return (a * b).tanh() * ps.once(lambda: x.exp())

    calls: list = []
    model = nn.Sequential(Outer(), Square())
    plain = step(model, X)
    for inner in ("keep", "recompute", "stash"):
        calls.clear()
        keeper = keep(model, "0", ps.Rule("0.inner", inner, min_bytes=16))
        for number in (1, 2):
            assert same(step(model, X, keeper), plain)
            # Twice in the first forward; in the second the one inside once() is not run.
            # (Under recompute that one is a region of its own, whose input is held: nothing to run.)
            assert len(calls) == 3 * number
        assert empty(keeper)
        keeper.detach()


def test_once_is_traced_by_a_compiler():
    class Model(nn.Module):
        def forward(self, x):
            return ps.once(lambda: x.sin()) * x

    x = torch.randn(4)
    assert torch.equal(torch.compile(Model(), fullgraph=True, backend="eager")(x), x.sin() * x)
