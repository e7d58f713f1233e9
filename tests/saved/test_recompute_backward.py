"""Recompute when backward runs twice, in parts, in another thread, later, or not at all."""

import threading

import pytest
import torch
from recomputed import MLP, WIDTH, Layer, Norm, Routed, Square, X, empty, keep, step
from support import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagestash as ps

pytestmark = pytest.mark.usefixtures("no_collector")


# --- backward more than once ---


def test_retain_graph_runs_the_region_again():
    model = nn.Sequential(MLP(dropout=0.2), Square())
    results = []
    for kept in (False, True):
        keeper = keep(model, "0") if kept else ps.Keeper(ps.Policy())
        model.zero_grad()
        model[0].forwards = 0
        torch.manual_seed(1)
        with keeper.step():
            loss = model(X).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(*results)
    assert model[0].forwards == 3
    assert empty(keeper)


def test_split_backward_runs_the_region_twice_more_at_most():
    model = nn.Sequential(MLP(dropout=0.2), MLP(dropout=0.2), Square())
    results = []
    for kept in (False, True):
        keeper = keep(model, "0", "1") if kept else ps.Keeper(ps.Policy())
        x = X.clone().requires_grad_()
        for layer in model:
            layer.forwards = 0
        torch.manual_seed(1)
        with keeper.step():
            loss = model(x).sum()
            (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
            results.append([dx, *torch.autograd.grad(loss, list(model.parameters()))])
    assert same(*results)
    assert [layer.forwards for layer in model] == [3, 3, 1]
    del loss
    assert empty(keeper)


def test_gradients_of_gradients():
    model = nn.Sequential(MLP(), Square())
    results = []
    for kept in (False, True):
        keeper = keep(model, "0") if kept else ps.Keeper(ps.Policy())
        x = X.clone().requires_grad_()
        with keeper.step():
            (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            results.append(
                torch.autograd.grad(dx.square().sum(), list(model.parameters()), allow_unused=True)[:1]
            )
    assert same(*results)


def test_microbatches_in_any_order():
    results = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(MLP(dropout=0.2), Norm(), Square())
        keeper = keep(model, "0", "1") if kept else ps.Keeper(ps.Policy())
        with keeper.step():
            losses = [model(X + number).sum() for number in range(3)]
            for number in (1, 2, 0):
                losses[number].backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(*results)


def test_backward_in_another_thread():
    """As on a GPU: autograd's thread has no regions of its own."""
    model = nn.Sequential(Layer(), Routed(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("0.mlp", "stash", min_bytes=16), "1")
    for _ in range(2):
        model.zero_grad()
        x = X.clone().requires_grad_()
        torch.manual_seed(1)
        with keeper.step():
            loss = model(x).square().sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert same([x.grad, *(p.grad for p in model.parameters())], plain[2:])
        del loss, thread
    assert empty(keeper)


# --- beside torch.utils.checkpoint ---


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_beside_checkpoint(where, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), MLP(dropout=0.2))

        def forward(self, x):
            y = checkpoint(self.inner, x.sin(), use_reentrant=reentrant)
            return y.cos()

    model = nn.Sequential(nn.Tanh(), Checkpointed(), Square())
    plain = step(model, X)
    keeper = keep(model, "1") if where == "inside" else keep(model, "1.inner.1", "1.inner.0")
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    assert empty(keeper)


# --- exceptions ---


def test_an_exception_in_either_forward_leaves_nothing():
    class Fails(MLP):
        fail_at = 0

        def forward(self, x):
            y = super().forward(x)
            if self.forwards == self.fail_at:
                raise ValueError("as asked")
            return y.sin()

    model = nn.Sequential(MLP(), Fails(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", "1")
    for fail_at in (1, 2):
        model[1].forwards, model[1].fail_at = 0, fail_at
        with pytest.raises(ValueError, match="as asked"):
            step(model, X, keeper)
        assert empty(keeper)
        assert not any(model[0].alive() + model[1].alive())
        model[1].fail_at = 0
        assert same(step(model, X, keeper), plain)
    assert empty(keeper)


def test_a_step_without_backward_leaves_nothing():
    model = nn.Sequential(Layer(), Square())
    keeper = keep(model, "0")
    with keeper.step():
        loss = model(X).sum()
    del loss
    assert empty(keeper)
    assert not any(model[0].mlp.alive() + model[1].alive())
