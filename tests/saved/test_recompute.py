"""Recompute: same bits, one more forward, and nothing held that can be recomputed."""

import copy

import pytest
import torch
from recomputed import MLP, ROWS, WIDTH, Batch, Counted, Norm, Square, X, empty, keep, step
from support import same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pagestash as ps
from pagestash.saved.storage import checksum

pytestmark = pytest.mark.usefixtures("no_collector")


# --- same bits, one more forward ---


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_and_gradients_are_the_same_to_the_last_bit(dropout):
    model = nn.Sequential(MLP(dropout=dropout), MLP(dropout=dropout), MLP(dropout=dropout))
    plain = step(model, X)
    keeper = keep(model, "0", "2")
    for layer in model:
        layer.forwards = 0
    for number in range(1, 3):
        assert same(step(model, X, keeper), plain)
        assert [layer.forwards for layer in model] == [2 * number, number, 2 * number]
    assert empty(keeper)


def test_the_inputs_of_a_region_die_when_its_backward_is_over():
    """Not at the end of the step, though a later region saved the output that they were held for."""
    model = nn.Sequential(Square(), MLP(), Square())
    keeper = keep(model, "1")
    inputs = []
    model[1].register_forward_hook(
        lambda module, args, out: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    with keeper.step():
        model(X.clone().requires_grad_()).sum().backward()
        assert [weak.expired() for weak in inputs] == [True]


def test_inputs_of_regions_die_though_somebody_holds_the_output_of_the_last():
    """As a pipeline schedule does. Each region's input is the output of the one before, which can be recomputed."""
    model = nn.Sequential(Square(), MLP(), MLP(), MLP())
    keeper = keep(model, "{1-3}")
    with keeper.step():
        out = model(X.clone().requires_grad_())
        out.backward(torch.ones_like(out), retain_graph=True)
        held = [model[0].made[-1], model[1].made[2], model[2].made[2]]
        assert not any(weak.expired() for weak in held)  # a second backward needs them
        out.backward(torch.ones_like(out))
        assert all(weak.expired() for weak in held)
        later = out.detach().requires_grad_().square()  # saved like any other tensor
        later.sum().backward()
        assert [layer.forwards for layer in model] == [1, 3, 3, 3]
    assert empty(keeper)


def test_what_the_region_saved_and_its_output_die_in_forward():
    model = nn.Sequential(MLP(), Square())
    keeper = keep(model, "0")
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert model[0].alive() == [False, False, False]
        assert keeper.stats().homes["keep"].bytes == x.nbytes
        assert keeper.stats().homes["recompute"].bytes == 0
        loss.backward()
    # Made again, all at once: h, the activation (saved with its dropout), and the output that Square saved.
    assert keeper.stats().homes["recompute"].peak == 4 * ROWS * (64 + 64 + WIDTH)
    assert not any(model[0].alive())
    assert empty(keeper)


def test_an_explicit_keep_rule_keeps_the_output():
    model = nn.Sequential(MLP(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("1", "keep"))
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert keeper.stats().homes["keep"].bytes == 2 * x.nbytes
        loss.backward()
    assert same(step(model, X, keeper), plain)


@pytest.mark.parametrize("home", ["stash", "recompute"])
def test_the_next_region_needs_no_home_for_the_output(home):
    model = nn.Sequential(nn.LayerNorm(WIDTH), Square(), nn.Linear(WIDTH, WIDTH))
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("1", home, min_bytes=16))
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    assert keeper.stats().homes["stash"].peak == 0
    assert empty(keeper)


def test_forward_stops_when_it_has_what_is_waited_for():
    class Tail(Counted):
        def forward(self, x):
            self.calls.append(None)
            y = x.sin().cos().view(-1)  # the cosine's input is the last tensor saved
            reached.append(1)
            return y + 1

    reached: list = []
    model = nn.Sequential(Tail())
    keeper = keep(model, "0")
    step(model, X, keeper, loss=lambda out: out.sum())
    assert model[0].forwards == 2
    assert len(reached) == 1


def test_inputs_are_not_run_for():
    """A projection saves its input alone, which is held: nothing to run again unless its output is wanted."""
    calls = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity())
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    forward = model[0].forward
    model[0].forward = lambda x: (calls.append("forward"), forward(x))[1]
    plain = step(model, X)
    calls.clear()
    keeper = keep(model, "0")
    assert same(
        step(model, X, keeper, loss=lambda out: out.sum()), step(model, X, loss=lambda out: out.sum())
    )
    assert calls.count("forward") == 2
    assert same(step(model, X, keeper), plain)
    assert calls.count("forward") == 4, "the loss squares the output, which is made again"


# --- what forward depends on ---


def test_autocast_is_as_it_was():
    model = nn.Sequential(MLP(), MLP())

    def loss(out):
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    cast = Cast()
    plain = step(cast, X, loss=loss)
    for rules in (["inner.0", "inner.1"], ["inner"], ["inner.1"]):
        keeper = keep(cast, *rules)
        assert same(step(cast, X, keeper, loss=loss), plain)
        keeper.detach()


def test_buffers_are_changed_once():
    results = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Norm(), Square())
        keeper = keep(model, "0") if kept else None
        results.append([step(model, X + number, keeper) for number in range(3)])
        results[-1].append([buffer.clone() for buffer in model.buffers()])
    assert all(same(a, b) for a, b in zip(*results))
    assert model[0].seen == 3


@pytest.mark.parametrize("size", [WIDTH, 32768], ids=["small", "large"])
def test_a_buffer_that_was_made_in_inference_mode(size):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            with torch.inference_mode():
                self.register_buffer("table", torch.rand(size))

        def forward(self, x):
            return (self.linear(x) + self.table[:WIDTH]).tanh()

    model = nn.Sequential(Table(), Table())
    plain = step(model, X)
    keeper = keep(model, "*")
    for _ in range(3):
        assert same(step(model, X, keeper), plain)


def test_a_large_buffer_that_begins_to_change_is_refused():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.zeros(32768))

        def forward(self, x):
            if x.shape[0] > 8:
                self.large += 1
            return x.sin() * self.large[0]

    model = nn.Sequential(Late())
    keeper = keep(model, "0")
    step(model, X, keeper)
    with pytest.raises(
        RuntimeError, match=r"region '0'.*buffer 'large' for the first time.*run the step again"
    ):
        step(model, X.repeat(2, 1), keeper)
    step(model, X.repeat(2, 1), keeper)
    assert model[0].large[0] == 2


class LateByData(nn.Module):
    """As a codebook, some of whose entries are replaced after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(2048, WIDTH))
        self.late = self.by_data = False

    def forward(self, x):
        y = self.linear(x)
        chosen = torch.cdist(y, self.codes).argmin(-1)
        codes = self.codes[chosen]
        if self.late:
            with torch.no_grad():
                written = self.codes.data if self.by_data else self.codes
                written[chosen] = codes * 0.5 + y * 0.5
        return (y * codes).tanh()


def test_a_large_buffer_that_begins_to_change_by_data_is_refused():
    model = nn.Sequential(LateByData(), nn.Linear(WIDTH, WIDTH))
    keeper = keep(model, "0")
    for _ in range(2):
        step(model, X, keeper)
    model[0].late = model[0].by_data = True
    refused = r"region '0'.*changed the buffer 'codes' without raising its version.*under torch.no_grad\(\)"
    with pytest.raises(RuntimeError, match=refused):
        step(model, X, keeper)
    model[0].late = False
    step(model, X, keeper)
    model[0].late, model[0].by_data = True, False
    with pytest.raises(RuntimeError, match="run the step again"):
        step(model, X, keeper)
    alone = copy.deepcopy(model)
    kept = step(model, X, keeper)
    assert same(step(alone, X), kept)
    assert torch.equal(alone[0].codes, model[0].codes)


class Odd(Counted):
    """Tuples, dicts, dataclasses and non-tensors, in and out."""

    def forward(self, batch, power, *, mask=None, flag=True):
        self.calls.append(None)
        assert flag is True
        y = batch.x.sin() * batch.scale + batch.extra["more"][0].cos()
        if mask is not None:
            y = torch.where(mask, y, 0.0)
        return {"y": (y**power, y.exp()), "n": 3}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x):
        batch = Batch(x, 0.5, {"more": [x * 2, "text"]})
        out = self.odd(batch, 3, mask=x > 0, flag=True)
        assert out["n"] == 3
        return out["y"][0] * out["y"][1]


def test_structured_arguments_and_outputs():
    model = Caller()
    plain = step(model, X)
    keeper = keep(model, "odd")
    model.odd.forwards = 0
    assert same(step(model, X, keeper), plain)
    assert model.odd.forwards == 2, "both outputs were saved, and are made in one run"
    assert empty(keeper)


def test_hooks_of_others_stand_outside_what_is_run_again():
    model = nn.Sequential(MLP(), Square())
    keeper = keep(model, "0")
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, out: out + 1, prepend=True)
    kept = step(model, X, keeper)
    keeper.detach()
    assert same(kept, step(model, X))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (), (3, 2)])
def test_a_checksum_of_any_shape(shape):
    assert checksum(torch.zeros(shape)).item() == 0
    assert checksum(torch.ones(shape)).item() != 0 or 0 in shape
