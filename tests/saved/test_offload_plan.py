"""Offload's plan: what stays, what leaves, what is fetched when; and steps that do not go by it."""

import pytest
import torch
from offloaded import MLP, RULE, keeper_for, losses_and_grads, moving, nothing_left
from support import same
from torch import nn

import pagestash as ps
from pagestash.saved.offload import transfers
from pagestash.saved.offload.moving import Offload

STEPS = {
    "more microbatches": (
        [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)],
        {},
    ),
    "fewer layers": ([torch.randn(32, 64)], {"layers": [0, 2]}),
    "another order": ([torch.randn(32, 64)], {"layers": [3, 1, 0, 2]}),
    "a layer twice": ([torch.randn(32, 64)], {"layers": [0, 1, 1, 2, 3]}),
    "larger": ([torch.randn(80, 64)], {}),
    "smaller": ([torch.randn(8, 64)], {}),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("prefetch", [0, 50_000, None])
def test_a_step_that_leaves_the_plan_is_right_and_recorded_anew(name, prefetch):
    model, x = MLP(depth=4), [torch.randn(32, 64)]
    batches, kwargs = STEPS[name]
    plain, other = losses_and_grads(model, x), losses_and_grads(model, batches, **kwargs)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=prefetch, **RULE))
    for _ in range(2):
        assert same(losses_and_grads(model, x, keeper), plain)
    before = moving(keeper).plan
    assert same(losses_and_grads(model, batches, keeper, **kwargs), other)
    nothing_left(keeper)
    if name not in ("larger", "smaller"):
        assert moving(keeper).plan is not before
    planned = moving(keeper).plan
    assert same(losses_and_grads(model, batches, keeper, **kwargs), other)
    assert moving(keeper).plan is planned
    assert same(losses_and_grads(model, x, keeper), plain)
    nothing_left(keeper)


def test_room_that_was_missing_is_there_in_the_next_step():
    model = MLP(depth=4)
    small, large = torch.randn(32, 64), torch.randn(64, 64)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    losses_and_grads(model, [small], keeper)
    layer = 32 * 320 * 4
    for expected in (3 * layer, 6 * layer):
        keeper.reset_peaks()
        losses_and_grads(model, [large], keeper)
        assert keeper.stats().homes["offload"].peak <= 2 * expected
    assert keeper.stats().homes["offload"].peak == 6 * layer
    assert keeper.stats().offload.host_bytes == 6 * layer


def test_an_evaluation_does_not_count():
    model, x = MLP(), [torch.randn(32, 64)]
    plain = losses_and_grads(model, x)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", prefetch_bytes=0, **RULE))
    with keeper.step(), torch.no_grad():
        model(x[0])
    assert keeper._offload.plan is None
    assert same(losses_and_grads(model, x, keeper), plain)
    planned = moving(keeper).plan
    with keeper.step(), torch.no_grad():
        model(x[0])
    assert moving(keeper).plan is planned
    assert same(losses_and_grads(model, x, keeper), plain)


def test_what_leaves_shares_the_window_with_what_comes_back(monkeypatch):
    """Where microbatches overlap, copies out and back are under way at one time."""
    model, batches = MLP(depth=6), [torch.randn(32, 64) for _ in range(4)]
    plain = losses_and_grads(model, batches)
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", **RULE))
    seen = []

    def one_forward_one_backward():
        model.zero_grad()
        waiting, losses = [], []
        with keeper.step():
            for x in batches:
                waiting.append(model(x))
                if len(waiting) == 3:
                    waiting[0].backward()
                    losses.append(waiting.pop(0).detach())
            for loss in waiting:
                loss.backward()
                losses.append(loss.detach())
        return losses, [p.grad.clone() for p in model.parameters()]

    assert same(one_forward_one_backward(), plain)
    monkeypatch.setattr(transfers, "is_done", lambda event: False)  # copies take as long as they are let
    put, fetch = Offload.put, Offload._fetch

    def note(self, coming=0):
        leaving = sum(origin.nbytes for each in self.transfers._leaving for _, origin in each.sources)
        assert leaving == self.window.leaving
        seen.append((leaving, self.window.resident + coming))

    def noting_put(self, group):
        put(self, group)
        note(self)

    def noting_fetch(self, group, asked=None):
        note(self, sum(entry.length for entry in group.members))
        fetch(self, group, asked)

    monkeypatch.setattr(Offload, "put", noting_put)
    monkeypatch.setattr(Offload, "_fetch", noting_fetch)
    assert same(one_forward_one_backward(), plain)
    window = moving(keeper).plan.window
    assert all(leaving + there <= window for leaving, there in seen)
    assert any(leaving and there for leaving, there in seen)
    nothing_left(keeper)


def test_copies_may_take_longer_where_memory_is_far_from_its_peak(monkeypatch):
    model, x = MLP(depth=8), torch.randn(32, 64)
    plain = losses_and_grads(model, [x])
    keeper = keeper_for(model, ps.Rule("layers.*", "offload", **RULE))
    losses_and_grads(model, [x], keeper)
    monkeypatch.setattr(transfers, "is_done", lambda event: False)
    put, seen, layer = Offload.put, [], 32 * (64 + 128 + 128) * 4

    def noting(self, group):
        put(self, group)
        seen.append(self.window.leaving // layer)

    monkeypatch.setattr(Offload, "put", noting)
    assert same(losses_and_grads(model, [x], keeper), plain)
    assert seen == [1, 2, 2, 2, 2, 1, 0, 0]  # a window of three, with the one being made and those that stay
    seen.clear()
    plan = moving(keeper).plan
    plan.headroom = {("put", key): 5 * layer for key in plan.groups if key[0] < "layers.6"}
    assert same(losses_and_grads(model, [x], keeper), plain)
    assert seen == [1, 2, 3, 4, 5, 4, 0, 0]
    nothing_left(keeper)


@pytest.mark.parametrize("prefetch", [0, None, 10**9])
def test_the_plan_does_not_change_what_it_was_made_from(prefetch):
    """A tensor that all layers save is asked for by all of them, whether it leaves or stays."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Turn() for _ in range(5))

        def forward(self, x):
            by = torch.cos(x)
            for layer in self.layers:
                x = layer(x, by)
            return x.square().sum()

    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x, by):
            return self.inner(x) * by + x

    model, x = Turned(), torch.randn(32, 64)
    plain = losses_and_grads(model, [x])
    keeper = keeper_for(model, ps.Rule("layers.**", "offload", prefetch_bytes=prefetch, **RULE))
    losses_and_grads(model, [x], keeper)
    plan = moving(keeper).plan
    for _ in range(3):
        assert same(losses_and_grads(model, [x], keeper), plain)
        assert moving(keeper).plan is plan
    nothing_left(keeper)


def test_what_a_fraction_leaves_on_the_device_takes_no_part_of_the_window(monkeypatch):
    """It would be full for all of backward, and every other tensor fetched when it is asked for."""
    model, x = MLP(depth=16), torch.randn(32, 64)
    plain = losses_and_grads(model, [x])
    keeper = keeper_for(model, ps.Rule("layers.*.1", "offload", fraction=0.6, **RULE))  # a tensor a layer
    losses_and_grads(model, [x], keeper)
    late, fetch = [], Offload._fetch

    def noting(self, group, asked=None):
        late.append(asked in group.members)
        fetch(self, group, asked)

    monkeypatch.setattr(Offload, "_fetch", noting)
    assert same(losses_and_grads(model, [x], keeper), plain)
    moved = keeper._offload.tally.peak // (32 * 128 * 4)
    assert late == [False] * moved
    assert 6 <= moved <= 8  # ten leave by the rule, and up to three of them stay at the end of forward
    nothing_left(keeper)
