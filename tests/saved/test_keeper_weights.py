"""Weights stay where they are, however and whenever a module gets them."""

import pytest
import torch
from stack import batch, run
from torch import nn

import pagestash as ps
from pagestash.saved.packed import Untouched
from pagestash.torch_internals import modules_in


def test_weights_stay_where_they_are(sized):
    model, keeper, _ = sized
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    packed = []
    original = keeper._saved.pack

    def spy(tensor):
        out = original(tensor)
        packed.append((tensor.untyped_storage()._cdata in weights, isinstance(out, Untouched)))
        return out

    keeper._saved.pack = spy
    x, rows = batch(20)
    run(model, x, rows, keeper)
    assert any(is_weight for is_weight, _ in packed)
    assert all(through for is_weight, through in packed if is_weight)


class Borrower(nn.Module):
    """Uses the parameters of its parts without calling them, as a fused operation does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight)


def _swap_data(model):
    model[0].inner.weight.data = model[0].inner.weight.data.clone()


def _replace_parameter(model):
    model[0].inner.weight = nn.Parameter(model[0].inner.weight.detach().clone())


def _replace_module(model):
    model[0].inner = nn.Linear(16, 16, bias=False)


def _add_parameter(model):
    model[0].register_parameter("late", nn.Parameter(torch.randn(16, 16)))
    model[0].forward = lambda x: nn.functional.linear(x, model[0].late)


@pytest.mark.parametrize("within", [False, True], ids=["between steps", "within a step"])
@pytest.mark.parametrize("change", [_swap_data, _replace_parameter, _replace_module, _add_parameter])
def test_weights_are_those_that_a_module_has_when_its_region_opens(change, within):
    model = nn.Sequential(Borrower())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256)))
    keeper.attach(model)
    x = torch.randn(8, 16, requires_grad=True)
    for _ in range(3):
        if not within:
            change(model)
        with keeper.step():
            if within:
                change(model)
            model(x).sum().backward()
    assert keeper.stats().homes["stash"].peak == x.nbytes  # and nothing of the weight, of 1024 bytes


def test_modules_are_found_once_each_wherever_they_are():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ModuleDict({"a": nn.ReLU()})))
    model.register_module("nothing", None)
    model[1].register_module("cycle", model)
    found = modules_in(model, shared)
    assert found[0] is model
    assert sorted(map(id, found)) == sorted(map(id, model.modules()))


def test_a_unit_in_several_regions_notes_its_weights_once():
    model = nn.Sequential(nn.Sequential(nn.Sequential(Unit(4))))
    keeper = ps.Keeper(ps.Policy([ps.Rule("**", "stash", min_bytes=16)])).attach(model)
    with keeper.step():
        model(torch.ones(2, 4)).sum().backward()
    assert (
        len(model[0][0][0]._forward_pre_hooks) == 3
    )  # its own, one that notes, and one that opens its region
    keeper.detach()
    assert len(model[0][0][0]._forward_pre_hooks) == 1


def test_a_weight_changed_between_forward_and_backward_is_refused(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    with keeper.step():
        loss = model(x, rows)
        with torch.no_grad():
            model.layers[1].experts.down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


class Unit(nn.Linear):
    """As FSDP2 makes of a module: once switched on, its weight is in new memory before each forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.on = False
        self.register_forward_pre_hook(Unit.gather, prepend=True)

    def gather(self, args):
        if self.on:
            self.weight.data = self.weight.data.clone()

    def unshard(self) -> None: ...
    def reshard(self) -> None: ...


def test_modules_that_gather_nothing_are_called_without_a_hook():
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16, bias=False)))
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash")])).attach(model)
    with keeper.step():
        model(torch.ones(2, 16)).sum().backward()
        assert not model[0][0]._forward_pre_hooks


@pytest.mark.parametrize("home", ["stash", "recompute"])
def test_weights_that_begin_to_be_reallocated_after_some_steps_stay_where_they_are(home):
    model = nn.Sequential(nn.Sequential(Unit(16), nn.Tanh()))
    rule = ps.Rule("0", home, min_bytes=16)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256))).attach(model)
    seen = []
    original = keeper._saved.pack

    def spy(tensor):
        packed = original(tensor)
        if tensor.untyped_storage()._cdata == model[0][0].weight.untyped_storage()._cdata:
            seen.append(isinstance(packed, Untouched))
        return packed

    keeper._saved.pack = spy
    x = torch.randn(8, 16, requires_grad=True)
    for step in range(5):
        model[0][0].on = step >= 2
        with keeper.step():
            loss = model(x).square().sum()
            if home == "stash":
                loss.backward()
    assert len(seen) == 5
    assert all(seen)
    assert len(model[0][0]._forward_pre_hooks) == 2  # its own, and the one that notes
    keeper.detach()
