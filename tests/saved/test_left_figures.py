"""A module keeps a figure with its graph, in no loss: it waits after each step, and steps are still planned."""

import gc
import tracemalloc

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps

WIDTH = 64
RULES = {
    "offload": ps.Rule("*", "offload", min_bytes=0, prefetch_bytes=0),
    "half offloaded": ps.Rule("*", "offload", min_bytes=0, prefetch_bytes=0, fraction=0.5),
    "stash": ps.Rule("*", "stash", min_bytes=0),
}


class Reporting(nn.Module):
    """With `figure` it keeps one, whose gradient is that of `scale` alone."""

    def __init__(self, figure: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.figure = None
        self.has_figure = figure

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.has_figure:
            self.figure = (self.scale * y.detach()).softmax(-1).square().mean()
        return y


def build(home, figure=True):
    torch.manual_seed(0)
    model = nn.Sequential(*[Reporting(figure) for _ in range(5)], nn.Linear(WIDTH, 1))
    if home is None:
        return model, None
    return model, ps.Keeper(ps.Policy([RULES[home]]), backend="torch").attach(model)


def step(model, keeper, x):
    model.zero_grad()
    if keeper is None:
        model(x).sum().backward()
    else:
        with keeper.step():
            model(x).sum().backward()
    return gradients(model)


def figures(model):
    """Gradients of the figures, whose backward comes after their step."""
    model.zero_grad()
    sum(layer.figure for layer in model if isinstance(layer, Reporting)).backward()
    return gradients(model)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def decided(keeper):
    return keeper.pool is not None or keeper._offload.plan is not None


@pytest.mark.parametrize("home", RULES)
def test_such_a_step_is_measured_twice_and_planned_then(home):
    model, keeper = build(home)
    seen = []
    for _ in range(3):
        step(model, keeper, torch.randn(8, WIDTH))
        seen.append(decided(keeper))
    assert seen == [False, True, True]


@pytest.mark.parametrize("home", RULES)
@pytest.mark.parametrize("late", [(), range(8), (0, 3), (1, 2)])
def test_gradients_of_the_loss_and_of_the_figures_are_those_without_a_policy(home, late):
    (plain, _), (model, keeper) = build(None), build(home)
    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        x = torch.randn(8 + 8 * (number % 3), WIDTH, generator=generator)
        assert same(step(model, keeper, x), step(plain, None, x))
        if number in late:
            assert same(figures(model), figures(plain))
    assert decided(keeper)


@pytest.mark.parametrize("home", RULES)
def test_nothing_grows_with_the_steps(home):
    model, keeper = build(home)
    x = torch.randn(8, WIDTH)

    def after(count):
        for _ in range(count):
            step(model, keeper, x)
        gc.collect()
        homes = keeper.stats().homes
        return tracemalloc.get_traced_memory()[0], {name: homes[name].bytes for name in homes}

    step(model, keeper, x)
    tracemalloc.start()
    try:
        memory, waiting = after(40)
        later, still = after(30)
    finally:
        tracemalloc.stop()
    assert still == waiting
    assert later - memory < 32 << 10  # 30 measured steps would be 250 KiB


@pytest.mark.parametrize("home", RULES)
def test_gradients_are_right_where_each_backward_comes_in_the_next_step(home):
    """What waits at the end of a step is asked for, there."""
    (plain, _), (model, keeper) = build(None, figure=False), build(home, figure=False)
    generator = torch.Generator().manual_seed(1)
    loss = wanted = None
    for number in range(8):
        x = torch.randn(8, WIDTH, generator=generator)
        model.zero_grad()
        plain.zero_grad()
        with keeper.step():
            new = model(x).sum()
            if loss is not None:
                loss.backward()
        wanted_new = plain(x).sum()
        if wanted is not None:
            wanted.backward()
            assert same(gradients(model), gradients(plain))
        assert number or not decided(keeper)
        loss, wanted = new, wanted_new


@pytest.mark.parametrize("home", RULES)
def test_a_model_is_not_moved_while_figures_of_measured_steps_wait(home):
    model, keeper = build(home)
    step(model, keeper, torch.randn(8, WIDTH))
    model.to("meta")
    with pytest.raises(RuntimeError, match="tensors of an earlier step still wait"), keeper.step():
        pass
