"""Attributes that the forward of a recomputed module sets: a replay finds what the first forward found."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import pagestash as ps


class Stateful(nn.Module):
    """Carries the state of the last batch, as a recurrent module does; none in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.state = None

    def forward(self, x):
        out, (h, c) = self.lstm(x, self.state)
        self.state = (h.detach(), c.detach())
        return out


class Counting(nn.Module):
    """Makes its counter in the first forward, and scales by it."""

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return (x * self.count).tanh()


class Annealed(nn.Module):
    """Scales by less in each forward: a number of any type, or one in a tuple."""

    def __init__(self, scale) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x):
        if isinstance(self.scale, tuple):
            (scale,) = self.scale
            self.scale = (0.97 * scale,)
        else:
            scale = self.scale
            self.scale = 0.97 * scale
        return (x * float(scale)).exp()


class Grown(nn.Module):
    """Has the longest batch so far: an int, then a tensor, which a later short batch resets."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 4

    def forward(self, x):
        length, before = torch.tensor(x.shape[1]), float(self.longest)
        if length > self.longest:
            self.longest = length
        elif length < 4 < self.longest:
            self.longest = 4
        return (x / before).exp()


class Sorting(nn.Module):
    """Leaves an order behind for the module around it, decided once."""

    def forward(self, x):
        def choose():
            self.order = x.detach().argsort(-1)
            return self.order

        ps.once(choose)


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sorting = Sorting()

    def forward(self, x):
        self.sorting(x)
        return x.gather(-1, self.sorting.order).exp()


class Registering(nn.Module):
    """Makes its weight in the first forward, from a tensor or from nothing."""

    def __init__(self, start) -> None:
        super().__init__()
        self.weight = start

    def forward(self, x):
        if not isinstance(self.weight, nn.Parameter):
            self.weight = nn.Parameter(torch.full((16,), 0.5) if self.weight is None else self.weight)
        return (x * self.weight).exp()


class Remembering(nn.Module):
    """Has a history that is longer than what is held, and one that is a list in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.itself = [0.5] * 100, []
        self.itself.append(self.itself)

    def forward(self, x):
        self.history, self.itself = [*self.history, 0.5], [self.itself]
        return (x * 0.5).exp()


KINDS = {
    "recurrent": Stateful,
    "counter that forward makes": Counting,
    "float": lambda: Annealed(0.5),
    "numpy": lambda: Annealed(np.float64(0.5)),
    "tuple": lambda: Annealed((0.5,)),
    "int that becomes a tensor": Grown,
    "set in once": Sorted,
    "tensor that becomes a parameter": lambda: Registering(torch.full((16,), 0.5)),
    "None that becomes a parameter": lambda: Registering(None),
    "long and endless lists": Remembering,
}
LENGTHS = (3, 8, 3, 9, 4, 2)


def trained(make, recompute):
    """Losses, gradients, and attributes after each of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), make(), nn.Linear(16, 1))
    keeper = None
    if recompute:
        keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, length in enumerate(LENGTHS):
        x = torch.randn(4, length, 16, generator=torch.Generator().manual_seed(number))
        if keeper is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with keeper.step():
                loss = model(x).square().mean()
                loss.backward()
        found.append((loss.detach(), *(p.grad.clone() for p in model.parameters()), attributes(model[1])))
        optimizer.step()
        optimizer.zero_grad()
    return found


def attributes(module):
    return [
        value for name in ("state", "count", "scale", "longest") for value in _flat(module.__dict__.get(name))
    ]


def _flat(value):
    if isinstance(value, tuple):
        return [each for item in value for each in _flat(item)]
    return [value.tolist() if isinstance(value, torch.Tensor) else value]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_sets_is_there_for_its_replay_as_before_it(kind):
    plain, ours = trained(KINDS[kind], False), trained(KINDS[kind], True)
    for (*tensors, left), (*others, right) in zip(plain, ours):
        assert all(map(torch.equal, tensors, others))
        assert left == right


class Reporting(nn.Module):
    """Leaves its result behind, for a report."""

    def forward(self, x):
        self.last = x.exp()
        return self.last.sin()


def test_a_result_with_a_graph_is_not_held_for_the_next_step():
    model = nn.Sequential(nn.Linear(16, 16), Reporting())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    gone = None
    for _ in range(4):
        with keeper.step():
            loss = model(torch.randn(4, 16)).sum()
            gc.collect()
            assert gone is None or gone() is None, "the last step's result is held in this one"
            loss.backward()
        gone = weakref.ref(model[1].last)
        assert gone() is not None
        del loss
