"""Attributes that the forward of a recomputed module sets: a replay finds what the first forward found."""

import warnings
from collections import Counter, OrderedDict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import NamedTuple

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


class Pair(NamedTuple):
    mean: torch.Tensor
    steps: int


@dataclass
class Record:
    mean: torch.Tensor


class Carrying(nn.Module):
    """Carries the mean of its last result, in whatever `wrap` makes of it; none in the first step."""

    def __init__(self, wrap, unwrap) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.wrap, self.unwrap = wrap, unwrap
        self.state = None

    def forward(self, x):
        x = self.linear(x)
        if self.state is not None:
            x = x + self.unwrap(self.state)
        self.state = self.wrap(x.mean((0, 1)))
        return x.tanh().exp()


class Appending(nn.Module):
    """Appends to a container that it has: `add` does, and `last` is what was added last."""

    def __init__(self, history, add, last) -> None:
        super().__init__()
        self.history, self.add, self.last = history, add, last
        self.shared = history

    def forward(self, x):
        scale = self.last(self.shared) if self.history else 0.5
        self.add(self.history, 0.9 * scale)
        return (x * scale).exp()


class AppendingOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history = [0.5]

    def forward(self, x):
        ps.once(lambda: self.history.append(0.9 * self.history[-1]))
        return (x * self.history[-1]).exp()


class Seldom(nn.Module):
    """Replaces a tensor in each third forward, and has another from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.scale = 0, torch.full((16,), 0.5)

    def forward(self, x):
        self.count += 1
        if self.count > 1:
            x = x + getattr(self, "late", torch.zeros(16))
            self.late = x.detach().mean((0, 1))
        scale = self.scale
        if self.count % 3 == 0:
            self.scale = 0.5 * scale + x.detach().abs().mean((0, 1))
        return (x * scale).tanh().exp()


class Buffered(nn.Module):
    """Makes a buffer of an attribute in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            del self.table
            self.register_buffer("table", torch.full((16,), 0.5))
        return (x * self.table).exp()


class DecidedWithGradient(nn.Module):
    """What it decides once has a gradient, and it finds it in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        def score():
            self.scores = self.linear(x).sigmoid()

        ps.once(score)
        return (x * self.scores).exp()


def set_and_move(own, value):
    own["last"] = value
    own[len(own)] = value
    if isinstance(own, OrderedDict):
        own.move_to_end("last", last=False)


class Outputs(OrderedDict):
    """As transformers' `ModelOutput`: keys are attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Forgetting(nn.Module):
    """Deletes an attribute inside of `once`: one from the step before, or of this forward."""

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        self.scale = 3.0
        if self.count > 2:
            ps.once(lambda: delattr(self, "scale"))
        if self.count == 2:
            self.late = 2.0
        elif self.count > 2 and hasattr(self, "late"):
            ps.once(lambda: delattr(self, "late"))
        return (x * getattr(self, "scale", 1.0) * getattr(self, "late", 0.5)).tanh().exp()


class Replacing(nn.Module):
    """Replaces an object whose memory the next one may get, inside of `once`."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.found = 0, None

    def forward(self, x):
        self.count, self.found = self.count + 1, None

        def find():
            self.found = Record(self.count)

        ps.once(find)
        y = (x * self.found.mean * 0.1).exp()
        self.found.result = y.mean()
        return y.sin()


class Unset(nn.Module):
    """Has a buffer that is None until its first forward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        before = 0.5 if self.mean is None else self.mean
        self.mean = x.detach().abs().mean() + 0.5
        return (x * before).tanh()


class Late(nn.Module):
    """Registers a buffer in its first forward."""

    def forward(self, x):
        before = self.mean if hasattr(self, "mean") else 0.5
        self.register_buffer("mean", x.detach().abs().mean() + 0.5)
        return (x * before).tanh()


class Shared(nn.Module):
    """Two parts have one buffer, which forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Module(), nn.Module()
        count = torch.zeros(())
        self.one.register_buffer("count", count)
        self.other.register_buffer("count", count)

    def forward(self, x):
        self.one.count += 1
        return (x / (1 + self.other.count.clone())).tanh()


class Counted(nn.Module):
    """Counts its forwards in a buffer, in `once`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def more(self):
        self.count += 1

    def forward(self, x):
        ps.once(self.more)
        return (x / (1 + self.count.clone())).tanh()


class Rotating(nn.Module):
    """Its parts take turns at being the first."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(number): nn.Linear(16, 16) for number in range(3)})

    def forward(self, x):
        first = next(iter(self.parts))
        self.parts[first] = self.parts.pop(first)
        for part in self.parts.values():
            x = part(x).tanh()
        return x


def detached(wrap):
    return lambda mean: wrap(mean.detach())


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
    "dict": lambda: Carrying(detached(lambda mean: {"mean": mean}), itemgetter("mean")),
    "named tuple": lambda: Carrying(detached(lambda mean: Pair(mean, 1)), attrgetter("mean")),
    "dataclass": lambda: Carrying(detached(Record), attrgetter("mean")),
    "with a gradient, cut when it is read": lambda: Carrying(lambda mean: mean, torch.Tensor.detach),
    "with a gradient, in a result of torch": lambda: Carrying(
        lambda mean: mean.topk(16), lambda state: state.values.detach()
    ),
    "with a gradient, in an output": lambda: Carrying(
        lambda mean: Outputs(mean=mean), lambda state: state.mean.detach()
    ),
    "deleted in once": Forgetting,
    "object that is replaced in once": Replacing,
    "with a gradient, in a tuple": lambda: Carrying(lambda mean: (mean, 1), lambda state: state[0].detach()),
    "list that grows": lambda: Appending([], list.append, itemgetter(-1)),
    "dict that grows": lambda: Appending(
        {}, lambda own, value: own.update({len(own): value}), lambda own: own[len(own) - 1]
    ),
    "ordered dict that grows": lambda: Appending(OrderedDict(), set_and_move, lambda own: own["last"]),
    "counter that grows": lambda: Appending(Counter(), set_and_move, lambda own: own["last"]),
    "dict of a class of its own that grows": lambda: Appending(
        Outputs(last=0.5), lambda own, value: own.update(last=value), lambda own: own["last"]
    ),
    "deque that grows": lambda: Appending(deque(maxlen=2), deque.append, itemgetter(-1)),
    "list that grows in once": AppendingOnce,
    "set in some steps": Seldom,
    "None that becomes a buffer": Buffered,
    "buffer that is None at first": Unset,
    "buffer that forward registers": Late,
    "buffer of two modules": Shared,
    "buffer that is written in once": Counted,
    "order of modules inside": Rotating,
    "with a gradient, set in once": DecidedWithGradient,
    "weight norm by a hook": lambda: hooked(nn.utils.weight_norm),
    "spectral norm by a hook": lambda: hooked(nn.utils.spectral_norm),
}
LENGTHS = (3, 8, 3, 9, 4, 2)


def hooked(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(nn.Linear(16, 16))


def trained(make, recompute, forwards=1):
    """Losses, gradients, and attributes after each of some steps; from the second on with so many forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), make(), nn.Linear(16, 1))
    keeper = None
    if recompute:
        keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(number)
        with nullcontext() if keeper is None else keeper.step():
            loss = torch.zeros(())
            for _ in range(forwards if number else 1):
                loss = loss + model(torch.randn(4, length, 16, generator=generator)).square().mean()
            loss.backward()
        found.append((loss.detach(), *(p.grad.clone() for p in model.parameters()), attributes(model[1])))
        optimizer.step()
        optimizer.zero_grad()
    return found


def attributes(module):
    return [
        value
        for name in ("state", "count", "scale", "longest", "history", "mean")
        for value in _flat(module.__dict__.get(name))
    ]


def _flat(value):
    if isinstance(value, tuple | list | set | deque):
        return [each for item in value for each in _flat(item)]
    if isinstance(value, dict):
        return _flat(tuple(value.items()))
    if isinstance(value, Record):
        return _flat(value.mean)
    return [value.tolist() if isinstance(value, torch.Tensor) else value]


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_sets_is_there_for_its_replay_as_before_it(kind, forwards):
    plain, ours = trained(KINDS[kind], False, forwards), trained(KINDS[kind], True, forwards)
    for (*tensors, left), (*others, right) in zip(plain, ours):
        assert all(map(torch.equal, tensors, others))
        assert tensors[0].isfinite()
        assert left == right


def test_a_buffer_without_a_shape_is_refused_by_name():
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.Tanh()))
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    with (
        pytest.raises(RuntimeError, match=r"region '1' .*'running_mean' gets its shape in the first forward"),
        keeper.step(),
    ):
        model(torch.randn(4, 16)).sum().backward()
