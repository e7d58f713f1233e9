"""A step that is run again begins where its first run did, whatever that run changed."""

import random
import time
import warnings

import numpy as np
import pytest
import torch
from reruns import LARGE, ROWS, SMALL, attach, data, ends, net
from support import same
from torch import nn

import pagestash as ps

# --- gradient scalers -------------------------------------------------------------------------------------------


def scaled(device, fused=False, clip=False):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def train_step(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, attach(model, device), optimizer=optimizer, scaler=scaler)
    return step, lambda: [*model.parameters(), scaler._scale, scaler._growth_tracker]


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled and clipped"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_gradients_are_unscaled_once(fused, clip):
    assert same(*ends(lambda device: scaled(device, fused, clip)))


def test_a_scale_that_has_not_been_made_yet_is_made_again():
    assert same(*ends(scaled, rows=(64, 4, 8)))


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_scaler_that_nobody_named_is_refused(fused):
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)

    def train_step(x):
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    keeper = attach(model, LARGE)
    with pytest.raises(ValueError, match=r"pass scaler="):
        ps.GraphedStep(train_step, keeper, optimizer=optimizer)(data()[0])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ps.GraphedStep(train_step, keeper, optimizer=optimizer)(data()[0])


# --- buffers ----------------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(32, 32)
        self.register_buffer("ema", torch.zeros(32))
        self.register_buffer("first", None)

    def forward(self, x):
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        if self.first is None:
            self.first = x.detach()[0].clone()
        return torch.tanh(self.lin(x - self.ema - self.first)) ** 2


def averaging(device):
    model = nn.Sequential(Averaging(), Averaging())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, attach(model, device), optimizer=optimizer)
    return step, lambda: [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("rows", [ROWS, (64, 4)], ids=["", "in the first step"])
def test_buffers_that_forward_replaces_are_put_back(rows):
    assert same(*ends(averaging, rows))


def odd_buffers():
    with torch.inference_mode():
        inference = torch.ones(32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "expanded": torch.ones(1).expand(32),
            "sparse": torch.eye(4).to_sparse(),
            "inference": inference,
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            "bytes": torch.ones(7, dtype=torch.uint8),
            "none": torch.ones(0),
        }


CHANGED = [kind for kind in odd_buffers() if kind not in ("quantized", "none", "sparse")]
"""No operation changes the others in place, and sparse ones are not restored."""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(kind, False) for kind in odd_buffers()] + [(kind, True) for kind in CHANGED],
    ids=[f"{kind} left alone" for kind in odd_buffers()] + [f"{kind} changed" for kind in CHANGED],
)
@pytest.mark.filterwarnings("ignore")
def test_buffers_of_every_kind_are_put_back_where_they_changed(kind, changes):
    def change(buffer):
        if kind == "inference":
            with torch.inference_mode():
                buffer.mul_(2)
        elif kind == "expanded":
            buffer[:1].mul_(2)  # which is all of it
        else:
            buffer.mul_(2)

    def make(device):
        model = net()
        model.register_buffer("odd", odd_buffers()[kind])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rules = [ps.Rule("0", "stash", min_bytes=0), ps.Rule("2", "stash", min_bytes=0)]

        def train_step(x):
            if changes:
                change(model.odd)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def state():
            dense = model.odd.dequantize() if kind == "quantized" else model.odd
            return [*model.parameters(), dense.to_dense() if dense.layout != torch.strided else dense]

        return ps.GraphedStep(train_step, attach(model, device, rules), optimizer=optimizer), state

    assert same(*ends(make))


# --- weights ----------------------------------------------------------------------------------------------------


def momentum(device, how, state=lambda model: ()):
    """Its forward moves frozen weights towards the trained ones, as momentum encoders do."""

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = net(), net().requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                for own, slow in zip(self.q.parameters(), self.k.parameters()):
                    if how == "replaced":
                        slow.data = slow.data * 0.9 + own.data * 0.1
                    else:
                        (slow.data if how == "through data" else slow).mul_(0.9).add_(own, alpha=0.1)
            return (self.q(x) - self.k(x)).square().mean()

    model = Momentum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the frozen ones, too, as in published scripts

    def train_step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    keeper = attach(model, device, [ps.Rule("q", "stash", min_bytes=0)])
    return ps.GraphedStep(train_step, keeper, optimizer=optimizer, state=state(model)), model.parameters


@pytest.mark.parametrize("device", [LARGE, 256], ids=["", "in a step that overflows"])
@pytest.mark.parametrize("how", ["in place", "through data", "replaced"])
def test_weights_that_no_optimizer_changes_are_refused_by_name(how, device):
    with pytest.raises(ValueError, match=r"changes the parameter 'k\.0\.weight'.*state="):
        momentum(device, how)[0](data()[1])


@pytest.mark.parametrize("how", ["in place", "through data"])
@pytest.mark.parametrize("rows", [ROWS, (64, 4)], ids=["", "in the first step"])
def test_weights_that_are_named_as_state_are_put_back(how, rows):
    assert same(*ends(lambda device: momentum(device, how, lambda model: [model.k]), rows))
    assert same(*ends(lambda device: momentum(device, how, lambda model: [*model.k.parameters()]), rows))


def test_state_that_gets_other_memory_is_refused_by_name():
    with pytest.raises(ValueError, match=r"gives 'k\.0\.weight' other memory"):
        momentum(LARGE, "replaced", lambda model: [model.k])[0](data()[0])


def test_trained_weights_that_forward_writes_to_are_refused_by_name():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"changes the parameter '0\.weight'"):
        ps.GraphedStep(train_step, attach(model, LARGE), optimizer=optimizer)(data()[0])


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False], ids=["with its optimizer", "gradients only"])
def test_gradients_of_parameters_outside_the_keepers_model_are_put_back(inside):
    def make(device):
        body, head = net(), nn.Linear(32, 4)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)

        def train_step(x):
            loss = head(body(x)).square().mean()
            loss.backward()
            if inside:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        given = {"optimizer": optimizer} if inside else {"state": [head]}
        step = ps.GraphedStep(train_step, attach(body, device), **given)
        both = [*body.parameters(), *head.parameters()]
        return step, lambda: both if inside else [p.grad for p in both]

    assert same(*ends(make))


def test_a_gradient_stays_the_tensor_that_it_was():
    """As for buckets whose views gradients are."""
    model = net()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()

    def train_step(x):
        model(x).square().mean().backward()

    step = ps.GraphedStep(train_step, attach(model, SMALL))
    for x in data():
        step(x)
    assert step.reruns == 1
    assert torch.equal(flat, torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert flat.abs().sum() > 0


# --- randomness and data ----------------------------------------------------------------------------------------

GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy, old": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
}
DRAWS = {
    "torch": lambda g: float(torch.rand((), generator=g)),
    "numpy": lambda g: g.random(),
    "numpy, old": lambda g: g.rand(),
    "python": lambda g: g.random(),
    "default": lambda: float(torch.rand(())),
    "numpy, global": lambda: np.random.rand(),  # noqa: NPY002
    "python, global": lambda: random.random(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_are_drawn_again(kind):
    def make(device):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = [GENERATORS[kind]()] if kind in GENERATORS else []

        def train_step(x):
            loss = model(x * DRAWS[kind](*own)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, attach(model, device), optimizer=optimizer, generators=own)
        return step, model.parameters

    assert same(*ends(make))


def test_what_is_no_generator_is_refused():
    with pytest.raises(ValueError, match=r"generators: 3: expected a torch\.Generator"):
        ps.GraphedStep(print, attach(net(), LARGE), generators=[3])


def test_making_a_step_does_not_look_through_what_it_names():
    """A list of tensors that `train_step` names, such as a dataset, costs nothing."""
    samples = [torch.zeros(1) for _ in range(200_000)]
    keeper = attach(net(), LARGE)
    began = time.perf_counter()
    ps.GraphedStep(lambda index: samples[index], keeper)
    assert time.perf_counter() - began < 1
