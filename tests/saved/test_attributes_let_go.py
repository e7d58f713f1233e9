"""What is held of attributes for a replay is let go of after it, and at the end of the step at the latest."""

import gc
import weakref

import pytest
import torch
from torch import nn

import pagestash as ps


class Box:
    def __init__(self, value) -> None:
        self.value = value


WRAPS = {
    "alone": lambda value: value,
    "tuple": lambda value: (value, 1),
    "dict": lambda value: {"value": value},
    "list": lambda value: [value],
    "object": Box,
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


def test_a_backward_after_its_step_is_refused_by_name():
    model = nn.Sequential(nn.Linear(16, 16), Result())
    keeper = keep(model)
    for _ in range(2):
        with keeper.step():
            loss = model(torch.randn(4, 16)).sum()
        with pytest.raises(
            RuntimeError, match=r"region '1' .* its backward comes after the step of its forward"
        ):
            loss.backward()
