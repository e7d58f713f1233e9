"""Attributes that the forward of a recomputed module sets: a replay finds what the first forward found."""

import warnings
import weakref
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
from pagestash.saved.recompute.attribute_values import MANY


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
        self.history, self.itself = [0.5] * (MANY + 1), []
        self.itself.append(self.itself)

    def forward(self, x):
        self.history, self.itself = [*self.history, 0.5], [self.itself]
        return (x * 0.5).exp()


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


class Averaging(nn.Module):
    """Changes a running mean in place, which is no buffer; it makes it in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = None

    def forward(self, x):
        mean = x.detach().abs().mean((0, 1))
        if self.mean is None:
            self.mean = mean + 0.5
        else:
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        return (x / self.mean.clone()).exp()


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


class Raising(torch.Tensor):
    """Nothing may be asked of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError(func)


class Odd(nn.Module):
    """Has attributes that do not like to be asked."""

    def __init__(self) -> None:
        super().__init__()
        gone = Counting()
        self.__dict__["proxy"] = weakref.proxy(gone)
        self.__dict__["raising"] = torch.ones(2).as_subclass(Raising)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x).exp()


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


class Deep(nn.Module):
    """Has a number in so many tuples in each other that Python could not go through them."""

    def forward(self, x):
        tuples = (None, 0.5)
        for _ in range(2000):
            tuples = (tuples, 0.9 * tuples[1])
        scale, self.tuples = getattr(self, "tuples", tuples)[1], tuples
        return (x * scale).exp()


class Slotted:
    """Has an attribute of its own, and one in a slot."""

    __slots__ = ("__dict__", "steps")

    def __init__(self, mean) -> None:
        self.mean, self.steps = mean, 1


class Outputs(OrderedDict):
    """As transformers' `ModelOutput`: keys are attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Known(nn.Module):
    """Two attributes are one object, which is the key of a table, too; its result hangs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = self.same = Slotted(None)
        self.table = {self.owner: 0.5}

    def forward(self, x):
        scale = self.table[self.owner] if self.owner is self.same else 2.0
        self.owner.mean = x.tanh()
        return (self.owner.mean * scale).exp()


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


class Watched(nn.Module):
    """Has its buffers under other names, too, and changes one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(()))
        self.statistics = {"seen": self.seen, "norm": [self.norm.running_mean, self.norm.num_batches_tracked]}

    def forward(self, x):
        self.seen += 1
        return self.norm(x.flatten(0, 1)).view_as(x).exp()


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
    "long and endless lists": Remembering,
    "dict": lambda: Carrying(detached(lambda mean: {"mean": mean}), itemgetter("mean")),
    "named tuple": lambda: Carrying(detached(lambda mean: Pair(mean, 1)), attrgetter("mean")),
    "dataclass": lambda: Carrying(detached(Record), attrgetter("mean")),
    "list in a tuple": lambda: Carrying(detached(lambda mean: ([mean],)), lambda state: state[0][0]),
    "long list": lambda: Carrying(lambda mean: mean.tolist() * 8, lambda state: torch.tensor(state[:16])),
    "with a gradient, cut when it is read": lambda: Carrying(lambda mean: mean, torch.Tensor.detach),
    "with a gradient, in an object": lambda: Carrying(Record, lambda state: state.mean.detach()),
    "with a gradient, in a result of torch": lambda: Carrying(
        lambda mean: mean.topk(16), lambda state: state.values.detach()
    ),
    "with a gradient, in an object with slots": lambda: Carrying(Slotted, lambda state: state.mean.detach()),
    "with a gradient, in an output": lambda: Carrying(
        lambda mean: Outputs(mean=mean), lambda state: state.mean.detach()
    ),
    "with a gradient, in lists of a dict": lambda: Carrying(
        lambda mean: {"means": [mean]}, lambda state: state["means"][0].detach()
    ),
    "known by identity": Known,
    "deleted in once": Forgetting,
    "object that is replaced in once": Replacing,
    "buffers under other names": Watched,
    "deep in tuples": lambda: Deep(),
    "with a gradient, in a tuple": lambda: Carrying(lambda mean: (mean, 1), lambda state: state[0].detach()),
    "list that grows": lambda: Appending([], list.append, itemgetter(-1)),
    "dict that grows": lambda: Appending(
        {}, lambda own, value: own.update({len(own): value}), lambda own: own[len(own) - 1]
    ),
    "ordered dict that grows": lambda: Appending(OrderedDict(), set_and_move, lambda own: own["last"]),
    "counter that grows": lambda: Appending(Counter(), set_and_move, lambda own: own["last"]),
    "long ordered dict that grows": lambda: Appending(
        OrderedDict.fromkeys([*range(MANY), "last"], 0.5), set_and_move, lambda own: own["last"]
    ),
    "long list that grows": lambda: Appending([0.5] * (MANY + 1), list.append, itemgetter(-1)),
    "long dict that grows": lambda: Appending(
        dict.fromkeys(range(MANY + 1), 0.5),
        lambda own, value: own.update({len(own): value}),
        lambda own: own[len(own) - 1],
    ),
    "warns once": lambda: Appending(set(), set.add, lambda own: 0.5),
    "deque that grows": lambda: Appending(deque(maxlen=2), deque.append, itemgetter(-1)),
    "list that grows in once": AppendingOnce,
    "set in some steps": Seldom,
    "None that becomes a buffer": Buffered,
    "dead proxy, and a tensor that raises": Odd,
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
    if isinstance(value, Record | Slotted):
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


class Shared(nn.Module):
    """Two modules have one tensor, which is changed inside of `once`."""

    def __init__(self) -> None:
        super().__init__()
        self.space = torch.ones(16)
        self.act = nn.Tanh()
        self.act.space = self.space

    def forward(self, x):
        ps.once(lambda: self.space.mul_(0.9))
        return (self.act(x) * self.act.space.clone()).exp()


class ChangesInATuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.means = (torch.ones(16),)

    def forward(self, x):
        self.means[0].mul_(0.9)
        return (x * self.means[0].clone()).exp()


class ChangesWithGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, x):
        if self.last is not None:
            with torch.no_grad():
                self.last.mul_(0.9)
        scale = 1.0 if self.last is None else self.last.detach().clone()
        self.last = x.mean(0)
        return (x * scale).exp()


class Summing(nn.Module):
    """The loop adds to a tensor of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"loss": torch.zeros(())}

    def forward(self, x):
        return x.exp()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Averaging, "a tensor in its attribute 'mean' was changed in place by its forward"),
        (Shared, "a tensor in its attribute 'space' was changed in place by its forward"),
        (ChangesInATuple, "a tensor in its attribute 'means' was changed in place by its forward"),
        (ChangesWithGradient, "a tensor in its attribute 'last' was changed in place by its forward"),
        (Summing, "a tensor in its attribute 'sums' was changed in place between forward and backward"),
    ],
)
def test_what_is_changed_in_place_and_has_no_copy_is_refused_by_name(make, message):
    model = nn.Sequential(nn.Linear(16, 16), make())
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    with pytest.raises(RuntimeError, match=f"region '1' .*{message}"):
        _two_steps(model, keeper)


def _two_steps(model, keeper):
    for _ in range(2):
        with keeper.step():
            loss = model(torch.randn(4, 1, 16)).sum()
            if isinstance(model[1], Summing):
                model[1].sums["loss"] += loss.detach()
            loss.backward()


def test_a_buffer_without_a_shape_is_refused_by_name():
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.Tanh()))
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)
    with (
        pytest.raises(RuntimeError, match=r"region '1' .*'running_mean' gets its shape in the first forward"),
        keeper.step(),
    ):
        model(torch.randn(4, 16)).sum().backward()


@pytest.mark.parametrize("home", ["keep", "stash", "offload", "recompute"])
def test_a_scripted_module_is_refused_by_name(home):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(torch.jit.script(nn.Linear(16, 16))))
    with pytest.raises(ValueError, match=r"rule '1' .*'1.0' is compiled by torch.jit"):
        ps.Keeper(ps.Policy([ps.Rule("1", home, min_bytes=0)]), backend="torch").attach(model)


@pytest.mark.parametrize("home", ["keep", "stash", "offload", "recompute"])
def test_of_a_traced_module_only_recompute_is_refused(home):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(nn.Linear(16, 16), torch.ones(4, 1, 16))
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(traced, nn.Tanh()), nn.Linear(16, 1))
    x, found = torch.randn(4, 1, 16), []
    for on in (False, True):
        keeper = ps.Keeper(ps.Policy([ps.Rule("1", home, min_bytes=0)]), backend="torch") if on else None
        if keeper is not None and home == "recompute":
            with pytest.raises(ValueError, match=r"rule '1' .*'1.0' is compiled by torch.jit"):
                keeper.attach(model)
            return
        with nullcontext() if keeper is None else keeper.attach(model).step():
            model(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *found))
