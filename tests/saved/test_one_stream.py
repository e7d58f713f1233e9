"""A region on a stream of its own: kept and recomputed, and refused where bytes would move.

(On a CPU streams are made up: `tests/gpu` has real ones.)
"""

import gc
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.moe.saving import Saving
from pagestash.pages.pool import PagePool
from pagestash.saved import one_stream

MAIN, SIDE = (0, 0, 1), (7, 0, 1)


@pytest.fixture
def on(monkeypatch):
    """A context in which another stream is the current one."""
    now = [MAIN]
    start = one_stream.OneStream.start

    def on_a_gpu(self, device):
        start(self, torch.device("cuda", 0))

    monkeypatch.setattr(one_stream.OneStream, "start", on_a_gpu)
    monkeypatch.setattr(one_stream, "current_stream_ids", lambda index: now[0])

    @contextmanager
    def other(stream):
        before, now[0] = now[0], stream
        try:
            yield
        finally:
            now[0] = before

    return other


class Sides(nn.Module):
    """Its second module is on a stream of its own, as shared experts may be."""

    def __init__(self, on):
        super().__init__()
        self.routed, self.shared = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.on = on

    def forward(self, x):
        y = self.routed(x)
        with self.on(SIDE):
            z = self.shared(x)
        return y + z


def steps(model, policy, count=3):
    keeper = ps.Keeper(policy).attach(model)
    for _ in range(count):
        model.zero_grad()
        torch.manual_seed(0)
        with keeper.step():
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def rules(**homes):
    options = {"recompute": {}, "keep": {}}
    return ps.Policy(
        [ps.Rule(name, home, **options.get(home, {"min_bytes": 1})) for name, home in homes.items()]
    )


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_two_streams_whose_tensors_move_are_refused_by_name_in_the_first_step(on, home):
    with pytest.raises(RuntimeError, match="region 'shared' saves tensors on another CUDA stream"):
        steps(Sides(on), rules(routed=home, shared=home), 1)


@pytest.mark.parametrize("home", ["keep", "recompute"])
@pytest.mark.parametrize("other", ["stash", "offload"])
def test_a_region_that_is_kept_or_recomputed_may_have_a_stream_of_its_own(on, home, other):
    model = Sides(on)
    plain = steps(model, ps.Policy())
    assert all(map(torch.equal, plain, steps(model, rules(routed=other, shared=home))))


class Normed(nn.Module):
    """Both parts take in the output of a norm."""

    def __init__(self, on):
        super().__init__()
        self.norm, self.sides = nn.LayerNorm(8), Sides(on)

    def forward(self, x):
        return x + self.sides(self.norm(x))


def normed(on, **homes):
    """Two layers: the input of the second is no leaf."""
    model = nn.Sequential(Normed(on), Normed(on))
    names = {f"*.{name.replace('_', '.')}" if name != "layer" else "*": home for name, home in homes.items()}
    return model, rules(**names)


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_a_replay_that_asks_for_a_moved_input_on_another_stream_is_refused(on, home):
    """The side's input is recomputed from the norm's, which waits in the home of the layer."""
    model, policy = normed(on, layer=home, norm="recompute", sides_routed=home, sides_shared="recompute")
    with pytest.raises(RuntimeError, match="saves tensors on another CUDA stream"):
        steps(model, policy, 1)


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_a_recomputed_region_with_a_second_stream_inside_is_refused_where_its_input_moves(on, home):
    """What it saves on that stream is discarded, and backward asks for it there."""

    class Turns(nn.Module):
        def forward(self, x):
            y = x.sin()
            with on(SIDE):
                return y.cos()

    model = nn.Sequential(OrderedDict(layer=nn.Sequential(nn.Linear(8, 8), Turns(), nn.Linear(8, 8))))
    with pytest.raises(RuntimeError, match=r"region 'layer\.1' saves tensors on another CUDA stream"):
        steps(model, rules(**{"layer": home, "layer.1": "recompute"}), 1)
    steps(model, rules(**{"layer.0": home, "layer.1": "recompute"}))


@pytest.mark.parametrize(
    "homes",
    [
        {"norm": "recompute", "sides_shared": "recompute", "sides_routed": "offload"},
        {"norm": "offload", "sides": "recompute"},
    ],
)
def test_replays_on_another_stream_are_fine_where_their_inputs_stay(on, homes):
    model, policy = normed(on, **homes)
    plain = steps(model, ps.Policy())
    assert all(map(torch.equal, plain, steps(model, policy)))


def test_a_step_on_another_stream_than_the_one_before_is_fine(on):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", "offload", min_bytes=1)])).attach(model)
    for stream in (MAIN, SIDE, SIDE, MAIN):
        with keeper.step(), on(stream):
            model(torch.randn(4, 8)).sum().backward()


def test_a_region_that_ends_on_another_stream_than_it_saves_on_is_refused(on):
    class Turns(nn.Module):
        def forward(self, x):
            with on(SIDE):
                return x.sin()

    with pytest.raises(RuntimeError, match="region '0' saves tensors on another CUDA stream"):
        steps(nn.Sequential(Turns(), nn.Linear(8, 8)), rules(**{"0": "offload"}), 1)


def test_what_was_refused_is_let_go_of_when_its_graph_is_gone_though_the_step_goes_on(on):
    class Turns(nn.Module):
        def forward(self, x):
            with on(SIDE):
                return x.sin()

    model = nn.Sequential(Turns())
    keeper = ps.Keeper(rules(**{"0": "offload"})).attach(model)
    with keeper.step():
        with pytest.raises(RuntimeError, match="saves tensors on another CUDA stream"):
            model(torch.randn(4, 8, requires_grad=True) * 2)
        gc.collect()
        assert not any(entry.handles for entry in keeper._saved._entries._of_step)


def test_a_fused_operation_that_writes_pages_on_another_stream_is_refused(on):
    model, saving = nn.Linear(4, 4), Saving(pool=PagePool(torch.device("cpu"), device_pages=4))
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", "stash")])).attach(model, ["routed", "shared"])

    def lease(name, stream):
        with ps.region(name), on(stream):
            return saving.lease((8, 16), torch.float32, torch.tensor(4))

    with keeper.step():
        held = [lease("routed", SIDE), lease("shared", SIDE)]
        with pytest.raises(RuntimeError, match="region 'shared' saves tensors on another CUDA stream"):
            lease("shared", MAIN)
        assert all(one is not None for one in held)
