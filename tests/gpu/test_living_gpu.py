"""A failed step on a GPU, eager and captured; a model that is moved there; a compiled layer."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pagestash as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from stack import Stack, batch, policy, run
from support import same

pytestmark = pytest.mark.gpu


def in_use(keeper):
    gc.collect()
    stats = keeper.stats()
    return (
        stats.pool.device.in_use + stats.pool.host.in_use + sum(each.bytes for each in stats.homes.values())
    )


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_a_step_that_fails_in_backward_gives_up_its_pages(home):
    torch.manual_seed(0)
    model = Stack().cuda()
    x, rows = batch(20, device="cuda")
    plain = run(model, x, rows)
    rules = [ps.Rule("layers.*.experts", home, min_bytes=256)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256, on_overflow="raise"))).attach(model)
    assert same(run(model, x, rows, keeper), plain)

    def fail(grad):
        raise KeyError

    for _ in range(3):
        hook = model.layers[1].experts.down.weight.register_hook(fail)
        with pytest.raises(KeyError):
            run(model, x, rows, keeper)
        hook.remove()
        assert sum(each.bytes for each in keeper.stats().homes.values()) == 0
        assert same(run(model, x, rows, keeper), plain)


def test_a_capture_that_fails_leaves_the_pool_as_it_was():
    torch.manual_seed(0)
    model = Stack().cuda()
    x, rows = batch(20, device="cuda")
    plain = run(model, x, rows)
    keeper = ps.Keeper(policy()).attach(model)

    def train_step(x, rows):
        loss = model(x, rows)
        if torch.cuda.is_current_stream_capturing():
            raise KeyError
        loss.backward()
        return loss

    step = ps.GraphedStep(train_step, keeper)
    for _ in range(2):
        step(x, rows)
    with pytest.raises(KeyError):
        step(x, rows)
    torch.cuda.synchronize()
    assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)
    assert in_use(keeper) == 0


def test_a_model_that_is_moved_to_the_gpu_after_attach():
    torch.manual_seed(0)
    model = Stack()
    keeper = ps.Keeper(policy(device="1MiB")).attach(model)
    assert keeper.pool.device.type == "cpu"
    model.cuda()
    x, rows = batch(20, device="cuda")
    plain = run(model, x, rows)
    assert same(run(model, x, rows, keeper), plain)
    assert keeper.pool.device.type == "cuda"
    assert keeper.stats().homes["stash"].peak > 0


@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
def test_a_compiled_layer_on_a_gpu(home):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))).cuda()
    model[1] = torch.compile(model[1])
    x = torch.randn(32, 64, device="cuda")

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", home, min_bytes=0)], ps.PoolConfig(page=256))).attach(model)
    for _ in range(3):
        with keeper.step():
            found = gradients()
        assert same(found, plain)


class RemakesItsOutput(torch.autograd.Function):
    """Its backward makes a graph of its own. One operation there saves its output, and nobody asks for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            x.softmax(1)
            y = x.sigmoid()
        return torch.autograd.grad(y, x, gradient)[0]


class Remakes(nn.Module):
    def forward(self, x):
        return RemakesItsOutput.apply(x)


@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
def test_steps_whose_backward_makes_a_graph_leave_no_memory(home):
    model = nn.Sequential(nn.Linear(256, 256), Remakes(), nn.Linear(256, 256)).cuda()
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", home, min_bytes=16)])).attach(model)
    x = torch.randn(512, 256, device="cuda")
    allocated = []
    for _ in range(8):
        with keeper.step():
            model(x).square().mean().backward()
        torch.cuda.synchronize()
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[4:])) == 1
