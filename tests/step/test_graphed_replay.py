"""The graphed step's launching and recovery, on a CPU: a stand-in for a CUDA graph runs the step at each replay.

What a GPU does differently (streams, captured memory) is tested in tests/gpu; what the host does is the same.
"""

import random
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support import same

import pagestash as ps
from pagestash.step import graphed
from pagestash.step.graphed import GraphedStep

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from stack import Stack, batch, policy
from support.steps import training_step

ROWS = [8, 8, 8, 50, 12, 64, 64, 3]  # the fourth and the sixth need more pages than any before


class Nothing:
    """A stream or an event where all work is in order."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Replayed:
    """Runs the step with the graph's inputs, and writes its outputs and gradients where the graph's are."""

    step: GraphedStep

    def replay(self):
        step = self.step
        args, kwargs = step._static.arguments
        theirs = {p: p.grad for p in step._keeper.parameters()}
        for parameter in theirs:
            parameter.grad = None
        with step._rates.on_device():
            step._guard.begin(eager=False)
            with step._keeper.step(check=False):
                result = step._train_step(*args, **kwargs)
                step._guard.end()
        step._outputs.copy_(graphed._report(result, step._guard.flag))
        for parameter, grad in step._grads.items():
            grad.copy_(parameter.grad)
        for parameter, grad in theirs.items():
            parameter.grad = grad


@pytest.fixture
def fake_graphs(monkeypatch):
    """Captures that run the step and then undo it, and graphs that are `Replayed`."""
    real = GraphedStep._capture
    zeros = torch.zeros

    def capture(self):
        state = [v for o in self._guard.optimizers for s in o.state.values() for v in s.values()]
        state += [*self._keeper.parameters(), *self._keeper.buffers(), self._keeper.pool.overflow]
        state += [t for s in self._involved.scalers for t in (s._scale, s._growth_tracker)]
        before = [tensor.detach().clone() for tensor in state]
        real(self)
        self._graph.step = self
        with torch.no_grad():
            for tensor, value in zip(state, before):
                tensor.copy_(value)

    @contextmanager
    def no_capture(graph, **_):
        yield

    monkeypatch.setattr(GraphedStep, "_capture", capture)
    monkeypatch.setattr(GraphedStep, "_on_stream", lambda self, run, *args: run(*args))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", no_capture)
    monkeypatch.setattr(torch.cuda, "Event", Nothing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))


def train(*, inside: bool, replayed: bool = True, fail=None, **pool):
    """Losses, parameters and gradients after all batches; gradients are zeroed once, by the caller."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    keeper = ps.Keeper(policy(headroom=1.0, **pool), backend="torch").attach(model)

    def train_step(x, rows):
        loss = model(x, rows)
        loss.backward()
        if inside:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step = GraphedStep(train_step, keeper, **({"optimizer": optimizer} if inside else {}))
    if replayed:
        step._graphed, step._stream = True, Nothing()
    torch.manual_seed(5)
    losses = []
    for number, rows in enumerate(ROWS):
        if fail is not None and number == fail[0]:
            fail[1](step, batch(rows, number), losses)
        else:
            losses.append(step(*batch(rows, number)))
        if number == 4 and not inside:
            optimizer.zero_grad()
    step.wait()
    assert model.seen == len(ROWS)
    grads = [] if inside else [p.grad for p in model.parameters()]
    return [torch.stack(losses), *(p.detach() for p in model.parameters()), *grads], step


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("inside", [True, False], ids=["with its optimizer", "gradients only"])
def test_a_short_pool_ends_with_the_bits_of_a_large_one(inside):
    short, large = train(inside=inside), train(inside=inside, device="4MiB")
    assert same(short[0], large[0])
    assert short[1].reruns >= 2
    assert large[1].reruns == 0


@pytest.mark.usefixtures("fake_graphs")
def test_gradients_add_up_as_in_eager_steps_also_after_zero_grad():
    replayed, eager = train(inside=False, device="4MiB"), train(inside=False, replayed=False, device="4MiB")
    assert same(replayed[0], eager[0])


@pytest.mark.usefixtures("fake_graphs")
def test_a_recovery_that_fails_loses_no_batch():
    """No memory to grow into, once: the caller frees some and goes on."""

    def out_of_memory(step, arguments, losses):
        grow = step._keeper.grow_pool

        def fail():
            step._keeper.grow_pool = grow
            raise torch.OutOfMemoryError("no room")

        step._keeper.grow_pool = fail
        with pytest.raises(torch.OutOfMemoryError):
            step(*arguments)
        assert step._graph is None  # it would write where the pool was
        losses.append(step(*arguments))

    # The fourth batch overflows; the host sees it at the sixth call.
    failed, large = train(inside=True, fail=(5, out_of_memory)), train(inside=True, device="4MiB")
    assert same(failed[0], large[0])


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled and clipped"])
def test_a_scalers_flag_and_ours_both_leave_an_update_out(clip):
    """The scaler sets `found_inf` on the optimizer at every step, where the graph's own flag was."""
    ends = []
    for pool in ({}, {"device": "4MiB"}):
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        keeper = ps.Keeper(policy(headroom=1.0, **pool), backend="torch").attach(model)

        def train_step(x, rows, blow, model=model, optimizer=optimizer, scaler=scaler):
            loss = model(x, rows)
            scaler.scale(loss * blow).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        step = GraphedStep(train_step, keeper, optimizer=optimizer, scaler=scaler)
        step._graphed, step._stream = True, Nothing()
        torch.manual_seed(5)
        losses = []
        for number, rows in enumerate(ROWS):
            # Infinite gradients in the sixth, which does not fit either, and in the seventh, which does.
            blow = torch.tensor(float("inf") if number in (5, 6) else 1.0)
            losses.append(step(*batch(rows, number), blow))
        step.wait()
        assert (step.reruns > 0) == (not pool)
        steps = [state["step"] for state in optimizer.state.values()]
        assert all(count == len(ROWS) - 2 for count in steps)
        ends.append([torch.stack(losses), scaler._scale, scaler._growth_tracker, *model.parameters()])
    assert same(*ends)


@pytest.mark.usefixtures("fake_graphs")
def test_a_buffer_that_forward_replaces_is_refused():
    class Averaging(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack(1)
            self.register_buffer("ema", torch.zeros(32))

        def forward(self, x, rows):
            self.ema = 0.9 * self.ema + 0.1 * x.mean(0)
            return self.stack(x - self.ema, rows)

    model = Averaging()
    rules = [ps.Rule("stack.layers.*.experts", "stash", min_bytes=256)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256)), backend="torch").attach(model)
    step = GraphedStep(lambda x, rows: model(x, rows).backward(), keeper)
    step._graphed, step._stream = True, Nothing()
    with pytest.raises(ValueError, match="replaces the buffer 'ema' of Averaging"):
        step(*batch(8))


@pytest.mark.usefixtures("fake_graphs")
def test_a_numpy_array_in_the_batch_is_a_tensor():
    seen = []
    model = Stack()
    keeper = ps.Keeper(policy(device="4MiB"), backend="torch").attach(model)

    def train_step(x, rows, scale):
        assert isinstance(scale["by"], torch.Tensor)
        seen.append(scale["by"].sum().item())
        loss = model(x, rows)
        loss.backward()
        return loss

    step = GraphedStep(train_step, keeper)
    step._graphed, step._stream = True, Nothing()
    x, rows = batch(8)
    array = np.ones(2)
    for _ in range(5):
        step(x, rows, {"by": array})
        array += 1  # the caller refills it
    assert seen == [2, 4, 6, 6, 8, 10]  # the third is captured, and replayed at once


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("cycle_momentum", [True, False])
def test_a_schedule_that_has_each_step_captured_again_is_named_once(cycle_momentum, caplog, monkeypatch):
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=100, cycle_momentum=cycle_momentum
    )
    keeper = ps.Keeper(policy(device="4MiB"), backend="torch").attach(model)
    step = GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
    step._graphed, step._stream = True, Nothing()
    captures = []
    capture = GraphedStep._capture
    monkeypatch.setattr(GraphedStep, "_capture", lambda self: captures.append(self) or capture(self))
    for number in range(6):
        step(*batch(8, number))
        schedule.step()
    warnings = [record.getMessage() for record in caplog.records if "captured again" in record.getMessage()]
    assert len(captures) == (4 if cycle_momentum else 1)
    assert len(warnings) == cycle_momentum
    assert all("betas" in warning for warning in warnings)


@pytest.mark.usefixtures("fake_graphs")
def test_a_capture_that_fails_leaves_the_host_as_it_was():
    model = Stack()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    calls = []

    def train_step(x, rows):
        calls.append(random.random())
        loss = model(x, rows)
        loss.backward()
        if len(calls) == 3:
            raise KeyError("in the capture")
        return loss

    step = GraphedStep(train_step, keeper)
    step._graphed, step._stream = True, Nothing()
    for _ in range(2):
        step(*batch(8))
    gradients = [p.grad for p in model.parameters()]
    with pytest.raises(KeyError):
        step(*batch(8))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients))
    step(*batch(8))
    step(*batch(8))
    assert calls[2] == calls[3], "what a capture draws was not drawn"
