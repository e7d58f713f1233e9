"""Tensors without plain memory of their own that operations save: they stay as they are, under every home."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

import pagestash as ps

HOMES = ("stash", "offload", "recompute")


def gradients(model, steps, *, home=None, around=None, rule="1"):
    """Of each of some steps of `around(model, x)`, under a rule of this home: for the model's second part."""
    keeper = None
    if home is not None:
        rules = [ps.Rule(rule, home, min_bytes=0)]
        keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(model)
    found = []
    for number in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        if keeper is None:
            around(model, x).backward()
        else:
            with keeper.step():
                around(model, x).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    if keeper is not None:
        keeper.detach()
    return found


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.sparse.mm(torch.eye(4).to_sparse(), self.linear(x)).tanh()


@pytest.mark.parametrize("home", HOMES)
def test_a_sparse_tensor_stays(home):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Sparse(), nn.Linear(16, 16))

    def step(model, x):
        return model(x).square().mean()

    plain = gradients(model, 3, around=step)
    assert all(map(torch.equal, plain, gradients(model, 3, home=home, around=step)))


class Unequal(nn.Module):
    """Rows as two sequences of unequal lengths, padded again; `inner` takes and gives a nested tensor."""

    def __init__(self, layout) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.layout = layout

    def forward(self, x):
        nested = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=self.layout)
        padded = torch.nested.to_padded_tensor(self.inner(nested) * nested, 0.0)
        return padded.sum((0, 1))[None].tanh() * x


CASES = [
    (layout, home, rule)
    for layout in (torch.strided, torch.jagged)
    for home in HOMES
    for rule in ("1", "1.inner")
    if (layout, home, rule) != (torch.jagged, "recompute", "1")
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layout", "home", "rule"), CASES)
def test_a_nested_tensor_stays(layout, home, rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Unequal(layout), nn.Linear(16, 16))

    def step(model, x):
        return model(x).square().mean()

    plain = gradients(model, 3, around=step)
    assert all(map(torch.equal, plain, gradients(model, 3, home=home, around=step, rule=rule)))


def test_a_jagged_tensor_that_a_recomputed_region_makes_is_refused_by_name():
    """A replay gives it other lengths than those that backward has. (Those of an argument are the same.)"""
    model = nn.Sequential(nn.Linear(16, 16), Unequal(torch.jagged))
    with pytest.raises(RuntimeError, match=r"region '1' is under recompute.*tensor \d was torch.float32"):
        gradients(model, 1, home="recompute", around=lambda model, x: model(x).sum())


def test_a_jagged_tensor_is_recomputed():
    """Its values have plain memory."""

    seen = []

    class Activation(nn.Module):
        def forward(self, x):
            inner = x.sin()
            seen.append(StorageWeakRef(inner.values().untyped_storage()))
            return torch.nn.functional.silu(inner)

    model = nn.Sequential(nn.Linear(16, 16), Activation())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    for _ in range(2):
        parts = [torch.randn(rows, 16) for rows in (3, 5)]
        with keeper.step():
            loss = model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum()
            assert seen[-1].expired()
            loss.backward()


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_a_zero_tensor_of_forward_mode_ad_stays(home):
    """It has no memory, and copying from there ended the process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)))

    def step(model, x):
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.flip(0))))
            return primal.square().mean() + 0.01 * tangent.square().mean()

    plain = gradients(model, 3, around=step)
    assert all(map(torch.equal, plain, gradients(model, 3, home=home, around=step)))
