"""Thin slices of one buffer: copied where they are few, and one entry where they are together most of it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.saved.storage import Entry

WIDTH, HEAD = 32, 8


class Fused(nn.Module):
    """A fused projection, and something like attention over it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core = Core()

    def forward(self, x):
        return self.core(self.qkv(x))


class Core(nn.Module):
    """Saves queries, keys and values, or queries `alone`."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = False

    def forward(self, qkv):
        query, key, value = qkv.unflatten(-1, (3, -1, HEAD)).transpose(1, -2).unbind(2)
        if self.alone:
            return query.sin()
        return (query.sin() * 2).exp() + (key.sin() * value.cos()).sin()


@pytest.fixture
def copied(monkeypatch):
    """The storage offsets of the slices that are copied."""
    seen = []
    inner = Entry.hold_slices

    def hold_slices(self):
        inner(self)
        seen.extend(recipe.byte_offset // 4 for recipe in self.slices or ())

    monkeypatch.setattr(Entry, "hold_slices", hold_slices)
    return seen


def fused(home):
    torch.manual_seed(0)
    model = nn.Sequential(*(Fused() for _ in range(6)))
    rule = ps.Rule("*.core", home, min_bytes=16)
    return model, ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256))).attach(model)


def gradients(model, x, keeper=None):
    with nullcontext() if keeper is None else keeper.step():
        sum(layer(x).square().sum() for layer in model).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("home", ["offload", "stash"])
def test_slices_that_are_all_of_a_projection_are_not_copied(home, copied):
    model, keeper = fused(home)
    x = torch.randn(2, 24, WIDTH)
    plain = gradients(model, x)
    for _ in range(4):
        assert same(gradients(model, x, keeper), plain)
    assert not copied


def test_their_group_moves_the_bytes_of_the_projection_once():
    model, keeper = fused("offload")
    x = torch.randn(2, 24, WIDTH)
    for _ in range(2):
        gradients(model, x, keeper)
    slices, results = (
        3,
        4,
    )  # results that are saved: of `exp`, of the sine and cosine that are multiplied, and that
    assert keeper._offload.order.groups["0.core", 0].device_bytes == (slices + results) * x.nbytes


@pytest.mark.parametrize("home", ["offload", "stash"])
def test_a_slice_that_is_alone_is_copied(home, copied):
    model, keeper = fused(home)
    for layer in model:
        layer.core.alone = True
    x = torch.randn(2, 24, WIDTH)
    plain = gradients(model, x)
    for _ in range(3):
        copied.clear()
        assert same(gradients(model, x, keeper), plain)
        assert copied == [0] * 6


def test_slices_that_are_few_together_are_one_copy_each(copied):
    class Few(nn.Module):
        def forward(self, x):
            parts = [x[:, 16 * at : 16 * at + 1 + at] for at in range(3)]
            return sum(part.sin().sum() for part in parts) + (2 * x).exp()[:, 0].sum()

    model = nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), Few())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "offload", min_bytes=16)])).attach(model)
    x = torch.randn(24, WIDTH)
    model(x).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    for _ in range(3):
        copied.clear()
        model.zero_grad()
        with keeper.step():
            model(x).backward()
        assert same([parameter.grad for parameter in model.parameters()], plain)
        assert copied == [0, 16, 32]


def test_two_saves_of_one_slice_are_one_copy(copied):
    class Twice(nn.Module):
        def forward(self, qkv):
            query = qkv.unflatten(-1, (3, -1, HEAD)).transpose(1, -2).unbind(2)[0]
            return query.sin() + query.cos()

    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), Twice())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "offload", min_bytes=16)])).attach(model)
    x = torch.randn(2, 24, WIDTH)
    for _ in range(3):
        copied.clear()
        with keeper.step():
            model(x).sum().backward()
        assert copied == [0]


def test_a_slice_of_another_buffer_is_not_taken_for_the_first_of_a_projection(copied):
    class WithFirstToken(nn.Module):
        def forward(self, qkv):
            query, key, value = qkv.unflatten(-1, (3, -1, HEAD)).transpose(1, -2).unbind(2)
            first = (2 * qkv)[:, 0].sin()
            return (query.sin() * key.sin() * value.cos()).sum() + first.sum()

    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), WithFirstToken())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "offload", min_bytes=16)])).attach(model)
    x = torch.randn(2, 24, WIDTH)
    copies = []
    for _ in range(4):
        copied.clear()
        with keeper.step():
            model(x).backward()
        copies.append(len(copied))
    assert copies == [1, 1, 1, 1]


def test_a_change_in_place_of_another_slice_is_refused_as_without_a_keeper():
    class Changes(nn.Module):
        def forward(self, qkv):
            query, key, value = qkv.unflatten(-1, (3, -1, HEAD)).transpose(1, -2).unbind(2)
            out = query.sin() + key.sin() * value.cos()
            if self.changes:
                with torch.no_grad():
                    value.mul_(2)
            return out

    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), Changes())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "offload", min_bytes=16)])).attach(model)
    x = torch.randn(2, 24, WIDTH)
    model[1].changes = False
    for _ in range(2):
        with keeper.step():
            model(x).sum().backward()
    model[1].changes = True
    with pytest.raises(RuntimeError, match="changed in place"), keeper.step():
        model(x).sum().backward()


@pytest.mark.parametrize("home", ["offload", "stash"])
def test_a_slice_that_is_expanded_comes_back_as_it_was(home):
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x[:, :1].expand(-1, 3))
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return grad

    class Expanded(nn.Module):
        def forward(self, x):
            return Saves.apply(x)

    seen: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Expanded())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", home, min_bytes=16)], ps.PoolConfig(page=256))).attach(model)
    x = torch.randn(24, WIDTH)
    for _ in range(3):
        with keeper.step():
            model(x).sum().backward()
        (found,) = seen
        assert torch.equal(found, model[0](x)[:, :1].expand(-1, 3))
        assert found.stride() == (WIDTH, 0)
        seen.clear()
