"""When regions run: the cuts of a step, forward and backward."""

import itertools

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.profiling.measure import _unobserved
from pagestash.profiling.timeline import EventClock, HostClock, Timeline
from pagestash.profiling.tracker import RegionTracker

WIDTH = 4


class Ticks:
    """A clock that advances by one at every mark."""

    def mark(self):
        self.now = getattr(self, "now", 0) + 1
        return self.now

    def between(self, marks):
        return [after - before for before, after in itertools.pairwise(marks)]


class Slow(torch.autograd.Function):
    """Takes so many seconds of a clock that stands still otherwise."""

    now = 0.0

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        Slow.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        Slow.now += ctx.backward_seconds
        return dy, None, None


class Sleep(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x):
        return Slow.apply(x, *self.seconds)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x):
        x = self.act(self.up(x))
        with ps.region("tail"):
            return x * x


def test_forward_is_cut_by_modules_and_regions_and_backward_in_reverse():
    model = nn.Sequential(Layer(), Layer())
    timeline = Timeline(Ticks())
    with RegionTracker(model, timeline).forward():
        loss = model(torch.randn(2, WIDTH)).sum()
    timeline.begin_backward(loss)
    loss.backward()
    seconds = timeline.finish()
    regions = [path[-1] for path in timeline.paths]
    layer = ["{0}", "{0}.up", "{0}", "{0}.act", "{0}", "{0}.tail", "{0}"]
    forward = ["", *(name.format(0) for name in layer), "", *(name.format(1) for name in layer), ""]
    assert regions[: timeline.turn] == forward
    assert regions[timeline.turn :] == ["", "1.tail", "1.act", "1.up", "0.tail", "0.act", "0.up"]
    assert timeline.paths[2] == ("", "0", "0.up")
    assert seconds == [1] * len(regions)


def test_a_watched_step_on_a_gpu_starts_when_the_host_is_ahead(monkeypatch):
    happened = []

    class Event:
        def __init__(self, enable_timing):
            self.number = len(happened)

        def record(self):
            happened.append("event")

        def elapsed_time(self, other):
            return 1e3 * (other.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    monkeypatch.setattr(
        "pagestash.profiling.timeline.spin", lambda cycles: happened.append(("sleep", cycles))
    )
    clock = EventClock([0.25, 0.5])
    marks = [clock.mark() for _ in range(3)]
    # The device spins between two events, which count for no segment.
    assert clock.between(marks) == [1.0, 1.0]
    spins = [("sleep", 500_000_000), ("sleep", 1_000_000_000)]
    assert happened == ["event", spins[0], "event", "event", spins[1], "event", "event", "wait"]
    EventClock([60.0]).mark()
    assert happened[9] == ("sleep", 2_000_000_000)


def test_a_module_that_raises_leaves_no_hook_and_no_frame():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 1, 1))
    with pytest.raises(RuntimeError, match="shapes"):
        ps.profile(model, torch.randn(2, WIDTH), repeats=1)
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    ps.profile(model[0], torch.randn(2, WIDTH), repeats=1)


def test_time_belongs_to_the_region_that_took_it(monkeypatch):
    monkeypatch.setattr(HostClock, "mark", lambda self: Slow.now)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Sleep(2.0, 0.0), Sleep(0.0, 4.0)))
    found = ps.profile(model, torch.randn(2, WIDTH), repeats=1)
    slow, late, both = (found.region(name) for name in ("1.0", "1.1", "1"))
    assert (slow.forward_seconds, slow.backward_seconds) == (2.0, 0.0)
    assert (late.forward_seconds, late.backward_seconds) == (0.0, 4.0)
    assert (both.total_forward_seconds, both.forward_seconds) == (2.0, 0.0)
    assert (both.total_backward_seconds, both.backward_seconds) == (4.0, 0.0)
    assert found.plain_seconds == 6.0
    total = found.region("")
    assert total.total_forward_seconds == pytest.approx(found.forward_seconds)
    assert total.total_backward_seconds == pytest.approx(found.backward_seconds)
    # What the link could move behind a region is the less of both ways.
    assert slow.hidden_bytes == int(slow.backward_seconds * found.link.back)


def test_the_step_takes_what_its_fastest_repetition_took(monkeypatch):
    monkeypatch.setattr(HostClock, "mark", lambda self: Slow.now)
    sleep = Sleep(1.0, 1.0)
    seconds = iter(
        [1.0, 1.0, 5.0, 1.0, 3.0, 1.0, 4.0, 1.0]
    )  # warm, recorded; then whole and by region in turn
    sleep.register_forward_pre_hook(lambda module, args: setattr(module, "seconds", (next(seconds), 1.0)))
    found = ps.profile(nn.Sequential(nn.Linear(WIDTH, WIDTH), sleep), torch.randn(2, WIDTH), repeats=3)
    assert found.plain_seconds == 4.0


def test_the_host_takes_what_its_fastest_repetition_took_unobserved():
    """Forward has two segments and backward one; each repetition launched both ways."""
    hosts = [[3.0, 1.0, 8.0], [4.0, 2.0, 9.0], [5.0, 3.0, 10.0]]
    launches = [[4.0, 5.0], [3.0, 6.0], [9.0, 4.5]]
    assert _unobserved(hosts, launches, turn=2) == [2.0, 1.0, 4.5]


def test_a_step_that_does_not_repeat_is_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1), 0

        def forward(self, x):
            self.calls += 1
            return (self.a if self.calls < 4 else self.b)(x)

    with pytest.raises(RuntimeError, match="another path"):
        ps.profile(Fickle(), torch.randn(2, WIDTH))


def test_every_pass_starts_from_the_same_state_which_is_put_back():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
            self.random = []

        def forward(self, x):
            self.random.append((torch.rand(()).item(), self.norm.running_mean.sum().item()))
            return self.norm(self.layer(x)).square().sum()

    model, x = Model(), torch.randn(8, WIDTH)
    model.layer.weight.grad = torch.full_like(model.layer.weight, 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ps.profile(model, x, repeats=2)
    assert len(set(model.random)) == 1
    assert len(model.random) == 6
    assert torch.equal(torch.get_rng_state(), state)
    assert same(model.state_dict(), before)
    assert torch.equal(model.layer.weight.grad, torch.full_like(model.layer.weight, 3.0))
    assert model.layer.bias.grad is None
    assert model.norm.weight.grad is None
