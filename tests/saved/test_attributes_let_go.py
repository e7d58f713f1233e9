"""What is held of attributes for a replay is let go of after it; what may have a graph, at the end of the step."""

import gc
import weakref
from collections import OrderedDict, deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import pagestash as ps


class Outputs(OrderedDict):
    pass


class Box:
    def __init__(self, value) -> None:
        self.value = value


WRAPS = {
    "alone": lambda value: value,
    "tuple": lambda value: (value, 1),
    "dict": lambda value: {"value": value},
    "list": lambda value: [value],
    "deque": lambda value: deque([value]),
    "set": lambda value: {value},
    "dict of another class": lambda value: Outputs(value=value),
    "object": Box,
    "object in an object": lambda value: Box(Box(value)),
    "list in an object": lambda value: Box([value]),
    "partial": lambda value: partial(torch.mul, value),
    "closure": lambda value: lambda: value,
}


class Reporting(nn.Module):
    """Leaves a figure behind that is in no loss: no backward walks its graph."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.wrap, self.report = wrap, None
        self.seen: list[weakref.ref] = []

    def forward(self, x):
        x = self.linear(x).tanh()
        value = x.softmax(-1).square().sum(-1).mean()
        self.seen.append(weakref.ref(value))
        self.report = self.wrap(value)
        return x


class Appending(Reporting):
    """Has a list of them, which its owner replaces after each step."""

    def __init__(self) -> None:
        super().__init__(None)
        self.report = []

    def forward(self, x):
        x = self.linear(x).tanh()
        value = x.softmax(-1).square().sum(-1).mean()
        self.seen.append(weakref.ref(value))
        self.report.append(value)
        return x


class AppendingOnce(Reporting):
    """Leaves the figure behind inside of `once`."""

    def forward(self, x):
        x = self.linear(x).tanh()

        def report():
            value = x.softmax(-1).square().sum(-1).mean()
            self.seen.append(weakref.ref(value))
            self.report = self.wrap(value)

        ps.once(report)
        return x


def keep(model):
    return ps.Keeper(ps.Policy([ps.Rule("1", "recompute", min_bytes=0)]), backend="torch").attach(model)


def alive_after_each_step(module, backward=True):
    model = nn.Sequential(nn.Linear(16, 16), module, nn.Linear(16, 1))
    keeper = keep(model)
    module.seen = seen = Seen()
    alive = []
    for _ in range(6):
        with keeper.step():
            loss = model(torch.randn(4, 16)).square().mean()
            if backward:
                loss.backward()
            del loss
        if isinstance(module, Appending):
            module.report = []
        gc.collect()
        alive.append(sum(each() is not None for each in seen.all))
    return alive


class Seen:
    """(No list: what a replay adds to one is undone.)"""

    def __init__(self) -> None:
        self.all = []

    def append(self, value) -> None:
        self.all.append(value)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("wrap", WRAPS)
def test_figures_of_earlier_steps_are_gone(wrap, backward):
    assert alive_after_each_step(Reporting(WRAPS[wrap]), backward) == [1] * 6


@pytest.mark.parametrize("backward", [True, False])
def test_figures_in_a_list_that_its_owner_replaces_are_gone(backward):
    assert alive_after_each_step(Appending(), backward) == [0] * 6


@pytest.mark.parametrize("wrap", ["alone", "list", "object"])
def test_figures_that_are_left_behind_inside_of_once_are_gone(wrap):
    assert alive_after_each_step(AppendingOnce(WRAPS[wrap])) == [1] * 6


class Result(nn.Module):
    """Leaves its result behind."""

    def forward(self, x):
        self.last = x.exp()
        return self.last.sin()


def test_the_result_of_the_last_step_is_held_until_the_regions_backward():
    model = nn.Sequential(nn.Linear(16, 16), Result())
    keeper = keep(model)
    last = None
    for _ in range(4):
        with keeper.step():
            loss = model(torch.randn(4, 16)).sum()
            assert last is None or last() is not None
            loss.backward()
            assert last is None or last() is None
        last = weakref.ref(model[1].last)
        del loss


class Reading(nn.Module):
    """Reads attributes of many kinds, and sets some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(16, 16), nn.RReLU()
        self.scale, self.shift = 1.0, torch.ones(16)
        self.scaling, self.order = {"default": 1.0}, [1.0, (torch.ones(16), 2.0)]
        self.count, self.state, self.box = 0, None, Box(1.0)
        self.temporary = None

    def forward(self, x):
        def choose():
            self.temporary = [0.5]

        ps.once(choose)
        self.count += 1
        x = self.linear(x) * self.scale * self.scaling["default"] + self.shift * self.count
        x = x * self.order[0] * self.order[1][0] * self.box.value * self.temporary[0]
        if self.state is not None:
            x = x + self.state
        self.state, self.temporary = x.detach().mean(0), None
        return self.noise(x * 0.1).tanh().exp()


def set_scale(module):
    module.scale *= 0.5


def set_shift(module):
    module.shift = module.shift * 0.5


def set_entry(module):
    module.scaling["default"] *= 0.5


def set_order(module):
    module.order[1] = (module.order[1][0] * 0.5, 2.0)


def set_new(module):
    module.extra = 1.0


LATE = {
    "nothing": lambda module: None,
    "number": set_scale,
    "tensor": set_shift,
    "entry of a dict": set_entry,
    "tuple in a list": set_order,
    "another attribute": set_new,
    "evaluation": nn.Module.eval,
}


@pytest.mark.parametrize("late", LATE)
def test_a_backward_after_its_step_finds_attributes_as_its_forward_did(late):
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Reading(), nn.Linear(16, 1))
        keeper = keep(model) if on else None
        for step in range(4):
            model.train()
            with nullcontext() if keeper is None else keeper.step():
                loss = model(torch.randn(4, 16)).square().mean()
            if step:  # values are compared in the first one
                LATE[late](model[1])
            loss.backward()
            found.append([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    assert all(all(map(torch.equal, *pair)) for pair in zip(found[:4], found[4:]))


def replaced(module):
    module.box = Box(0.5)


class ReadingOnce(nn.Module):
    """Leaves a result with a graph behind inside of `once`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(16, 16), None

    def forward(self, x):
        def decide():
            self.gate = self.linear(x).sigmoid()

        ps.once(decide)
        y = (x * self.gate).exp()
        self.gate = None
        return y


class Gathering(Reading):
    """Adds its result to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.results = []

    def forward(self, x):
        self.results.append(super().forward(x))
        return self.results[-1]


class Carrying(nn.Module):
    """Carries its result to the next forward, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = x.exp() if self.last is None else (x + self.last.detach()).exp()
        return self.last.sin()


@pytest.mark.parametrize(
    ("make", "late", "name"),
    [
        (Reading, replaced, "box"),
        (ReadingOnce, LATE["nothing"], "gate"),
        (Gathering, LATE["nothing"], "results"),
        (Carrying, LATE["nothing"], "last"),
    ],
)
def test_a_backward_after_its_step_is_refused_where_what_may_have_a_graph_was_replaced(make, late, name):
    model = nn.Sequential(nn.Linear(16, 16), make(), nn.Linear(16, 1))
    keeper = keep(model)
    for _ in range(2):
        with keeper.step():
            model(torch.randn(4, 16)).square().mean().backward()
    with keeper.step():
        loss = model(torch.randn(4, 16)).square().mean()
    late(model[1])
    with pytest.raises(
        RuntimeError, match=rf"region '1' .*{name!r} has changed since its forward, whose step is over"
    ):
        loss.backward()
