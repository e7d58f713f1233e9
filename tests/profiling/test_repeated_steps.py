"""Measured steps start from one state: gradients in place or none, and the caller's are put back."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.profiling import steps
from pagestash.profiling.measure import repeated_step
from pagestash.profiling.timeline import HostClock

WIDTH = 4


class Watching(nn.Module):
    """Notes whether forward finds gradients."""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.found = []

    def forward(self, x):
        self.found.append([parameter.grad is not None for parameter in self.parameters()])
        return self.frozen(self.layer(x)).square().sum()


@pytest.mark.parametrize("gradients", ["held", "fresh"])
def test_every_run_finds_gradients_in_place_or_none(gradients):
    model = Watching()
    ps.profile(model, torch.randn(2, WIDTH), repeats=2, gradients=gradients)
    there = gradients == "held"
    assert all(found == [there, there, False, False] for found in model.found)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("gradients", ["held", "fresh"])
def test_every_run_of_a_loop_finds_them_too_and_the_first_is_not_timed(monkeypatch, gradients):
    """(With the host's clock: there is no GPU.)"""
    monkeypatch.setattr(steps, "EventClock", HostClock)
    model = Watching()
    step = repeated_step(model, torch.randn(2, WIDTH), gradients=gradients)
    entered = []

    @contextmanager
    def around():
        entered.append(len(model.found))
        yield

    with step.gradients():
        found = step.run_loop(around, 3)
    assert entered == [0, 1, 2, 3]
    assert len(found) == 3
    assert all(seconds > 0 for seconds in found)
    there = gradients == "held"
    assert model.found == 4 * [[there, there, False, False]]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("one", "settle", "count"), [(0.1, 10, 10), (0.001, 40, 40), (3.0, 1, 5)])
def test_the_time_of_a_loop_is_the_mean_after_a_period_of_load(monkeypatch, one, settle, count):
    """Under lasting load some steps are slower, and they count."""
    asked = []

    def run_loop(self, around, steps):
        asked.append(steps)
        late = [2.0 if number % 5 == 0 else 1.0 for number in range(count)]
        return (steps - count) * [0.5] + late

    monkeypatch.setattr(steps.RepeatedStep, "run_loop", run_loop)
    step = repeated_step(Watching(), torch.randn(2, WIDTH))
    assert step.time_loop(nullcontext, one) == pytest.approx(1.2)
    assert asked == [settle + count]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_makes_the_host_wait_is_known_by_the_warning(monkeypatch, waits, fails):
    """(Of torch, on a GPU: `test_profile_gpu.py`.)"""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Warning(Watching):
        def forward(self, x):
            warnings.warn("something else", stacklevel=2)
            if waits:
                warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)
            if fails:
                raise KeyError("forward failed")
            return super().forward(x)

    step = repeated_step(Warning(), torch.randn(2, WIDTH))
    with step.gradients(), pytest.raises(KeyError) if fails else nullcontext():
        assert step.waits_within() == waits
    assert modes == [0, "warn", 0]


@pytest.mark.parametrize("gradients", ["held", "fresh"])
def test_gradients_of_the_caller_are_the_same_tensors_with_the_same_bits(gradients):
    model = Watching()
    mine = torch.randn(WIDTH, WIDTH)
    model.layer.weight.grad, copy = mine, mine.clone()
    ps.profile(model, torch.randn(2, WIDTH), repeats=1, gradients=gradients)
    assert model.layer.weight.grad is mine
    assert torch.equal(mine, copy)
    assert model.layer.bias.grad is None


def test_a_profile_says_how_it_was_measured_and_refuses_anything_else(tmp_path):
    model = Watching()
    for gradients in ("held", "fresh"):
        ps.profile(model, torch.randn(2, WIDTH), repeats=1, gradients=gradients).save(tmp_path / "p.json")
        assert ps.Profile.load(tmp_path / "p.json").gradients == gradients
    with pytest.raises(ValueError, match="gradients='none': expected 'held' or 'fresh'"):
        ps.profile(model, torch.randn(2, WIDTH), gradients="none")


def test_gradients_are_put_back_where_there_is_no_memory_for_those_that_a_run_should_find(monkeypatch):
    model = Watching()
    made = []

    def too_little(like):
        if made:
            raise torch.OutOfMemoryError("none left")
        made.append(like)
        return torch.zeros(like.shape)

    monkeypatch.setattr(torch, "zeros_like", too_little)
    with pytest.raises(torch.OutOfMemoryError):
        ps.profile(model, torch.randn(2, WIDTH), repeats=1)
    assert made
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_a_hook_takes_away_and_one_with_a_graph_are_put_back():
    model = Watching()
    weight, bias = model.layer.weight, model.layer.bias
    weight.grad = torch.ones_like(weight)
    source = torch.ones(WIDTH, requires_grad=True)
    bias.grad = source.square()
    mine = weight.grad, bias.grad
    weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ps.profile(model, torch.randn(2, WIDTH), repeats=1)
    assert (weight.grad is mine[0], bias.grad is mine[1]) == (True, True)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    bias.grad.sum().backward()
    assert torch.equal(source.grad, torch.full((WIDTH,), 2.0))


def test_parameters_without_a_shape_yet_are_profiled():
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    assert ps.profile(model, torch.randn(2, WIDTH), repeats=1).total_bytes > 0
