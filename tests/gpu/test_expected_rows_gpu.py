"""A stash rule's `fraction` on a GPU: expected rows leave by the copy engine, eagerly and in a graph.

The same bits with either side of each hand-over held back, and a peak that falls by the bytes that left.
"""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support import same
from support.faults import broken_arrival, broken_let_go
from support.uninitialised import filled_with_nan
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.saved.streams import SideStream

pytestmark = pytest.mark.gpu
D, N, E, K, T, DEPTH = 1024, 512, 8, 2, 4096, 6
ROWS, EXPECTED = T * K, 3 * T * K // 4
LAYER = EXPECTED * (D + 2 * N) * 2
LONG = 20_000_000  # cycles: about 10 ms, far longer than any copy or layer here


class Loopback:
    """A dispatch whose wire ends where it starts, with room for twice the rows; `tokens` have experts here."""

    experts = E

    def __init__(self) -> None:
        self.tokens, self.expected = torch.tensor([T], device="cuda"), EXPECTED

    def send(self, x, ids, weights, over):
        here = torch.arange(T, device="cuda") < self.tokens
        ids = torch.where(here[:, None], ids, -1)
        return Received(x, weights, ids, route(ids, E, capacity=2 * ROWS, over=over), self.expected)

    def collect(self, slots, received):
        return slots

    def grow_capacity(self, **_):
        return False


class Head(torch.autograd.Function):
    """Where memory peaks, as at the logits of a model."""

    @staticmethod
    def forward(ctx, x):
        logits = torch.zeros(4 * DEPTH * LAYER, dtype=torch.uint8, device=x.device)
        ctx.save_for_backward(x * (2 / x.numel()))
        return x.float().square().mean() + logits[0]

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return slope * grad.to(slope.dtype)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MoEConfig(width=D, expert_width=N, experts=E, top_k=K)
        self.wire = Loopback()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(D), "moe": MoE(config, dispatch=self.wire)})
            for _ in range(DEPTH)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["moe"](layer["norm"](x))[0]
        return Head.apply(x)


@pytest.fixture
def model():
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    return Stack().to(device="cuda", dtype=torch.bfloat16)


def x_of(seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(T, D, device="cuda", dtype=torch.bfloat16, generator=generator)


def keeper_for(model, fraction=1.0, prefetch=LAYER, **pool):
    rule = ps.Rule(
        "layers.*.moe.experts", "stash", fraction=fraction, prefetch_bytes=prefetch if fraction else None
    )
    return ps.Keeper(ps.Policy([rule], ps.PoolConfig(**pool))).attach(model)


def gradients(model, keeper=None, tokens=T):
    model.zero_grad(set_to_none=False)  # so that they are no part of any difference in memory
    model.wire.tokens.fill_(tokens)
    with nullcontext() if keeper is None else keeper.step():
        model(x_of()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


# --- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "prefetch"), [(0.4, 0), (1.0, 0), (1.0, LAYER), (1.0, None), (1.0, 3 * LAYER)]
)
def test_gradients_are_the_same_to_the_last_bit(model, fraction, prefetch):
    with filled_with_nan():
        counts = (T, T, T // 2, T)  # half of them: fewer rows than are expected
        plain = [gradients(model, tokens=tokens) for tokens in counts]
        keeper = keeper_for(model, fraction, prefetch)
        for tokens, right in zip(counts, plain):
            assert same(gradients(model, keeper, tokens), right)
    stats = keeper.stats()
    assert stats.homes["offload"].peak > 0
    assert not any(size.bytes for size in stats.homes.values())
    assert stats.pool.device.in_use == 0


def train(model, fraction, counts, late=None, first_expected=EXPECTED, **pool):
    """Losses and parameters after steps in a graph, with so many tokens each; `first_expected` in the warm-up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    keeper = keeper_for(model, fraction, **pool)

    def train_step(x, tokens):
        model.wire.tokens.copy_(tokens)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    losses = []
    for number, tokens in enumerate(counts):
        model.wire.expected = first_expected if number < 2 else EXPECTED
        if number == 2 and late is not None:
            keeper.size_pool()  # as the capture does, so that there are streams to hold back
            late(keeper)
        losses.append(step(x_of(number), torch.tensor([tokens], device="cuda")))
    step.wait()
    return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())], keeper, step


def fresh():
    torch.manual_seed(0)
    return Stack().to(device="cuda", dtype=torch.bfloat16)


def test_in_a_graph_an_overflowing_step_is_run_again_to_the_same_bits():
    few = EXPECTED // K + 64  # the warm-up has hardly any excess rows, so the pool is too small for more
    counts = (few, few, few, T, T // 2, T, few)
    right, plain, reruns = train(fresh(), 0.0, counts, headroom=1.0)
    found, keeper, step = train(fresh(), 1.0, counts, headroom=1.0)
    assert same(found, right)
    assert step.reruns == reruns.reruns > 0
    stats = keeper.stats()
    assert stats.homes["offload"].peak >= (DEPTH - 2) * LAYER
    assert plain.stats().homes["offload"].peak == 0
    assert stats.pool.device.in_use == 0
    assert stats.offload.refused_peak == 0


@pytest.mark.parametrize("first", [0, EXPECTED // 4])
def test_expected_rows_that_a_capture_is_the_first_to_see_stay(first):
    """Nothing was measured of them, and a capture cannot pin memory."""
    right, *_ = train(fresh(), 0.0, (T,) * 5, first_expected=first)
    found, keeper, _ = train(fresh(), 1.0, (T,) * 5, first_expected=first)
    assert same(found, right)
    assert keeper.stats().homes["offload"].peak < (DEPTH - 1) * LAYER


# --- one side held back -------------------------------------------------------------------------------------


def hold_back(monkeypatch, which):
    """Everything that the out or in stream does comes late, in a graph, too."""
    entered = SideStream.after

    @contextmanager
    def late(self, *events):
        with entered(self, *events):
            if self._late:
                torch.cuda._sleep(LONG)
            yield

    monkeypatch.setattr(SideStream, "_late", False, raising=False)
    monkeypatch.setattr(SideStream, "after", late)
    return lambda keeper: setattr(getattr(keeper._offload.transfers, which), "_late", True)


@pytest.mark.parametrize("which", ["_out", "_in"])
@pytest.mark.parametrize("prefetch", [0, LAYER, 3 * LAYER])
def test_a_side_stream_that_is_late_changes_nothing(model, monkeypatch, which, prefetch):
    plain = gradients(model)
    keeper = keeper_for(model, prefetch=prefetch)
    gradients(model, keeper)
    hold_back(monkeypatch, which)(keeper)
    for _ in range(2):
        assert same(gradients(model, keeper), plain)


@pytest.mark.parametrize("which", ["_out", "_in"])
def test_a_side_stream_that_is_late_changes_nothing_in_a_graph(monkeypatch, which):
    counts = (T,) * 5
    right, *_ = train(fresh(), 0.0, counts)
    found, *_ = train(fresh(), 1.0, counts, late=hold_back(monkeypatch, which))
    assert same(found, right)


def test_a_compute_stream_that_is_late_changes_nothing(model):
    plain = gradients(model)
    keeper = keeper_for(model)
    gradients(model, keeper)
    for layer in model.layers:
        layer["norm"].register_forward_hook(lambda *_: torch.cuda._sleep(LONG // 10))
        layer["norm"].register_full_backward_hook(lambda *_: torch.cuda._sleep(LONG // 10))
    assert same(gradients(model, keeper), plain)


@pytest.mark.parametrize(
    ("which", "fault"),
    [("_out", broken_let_go), ("_in", broken_arrival)],
    ids=["source let go early", "read before its copy back"],
)
def test_without_the_event_the_late_stream_would_be_noticed(model, monkeypatch, which, fault):
    plain = gradients(model)
    keeper = keeper_for(model, prefetch=0)
    gradients(model, keeper)
    hold_back(monkeypatch, which)(keeper)
    fault(monkeypatch)
    assert not same(gradients(model, keeper), plain)
    torch.cuda.synchronize()


# --- memory -------------------------------------------------------------------------------------------------


def peak_of(step) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("prefetch", [LAYER, 2 * LAYER, None])
def test_the_peak_falls_by_the_bytes_that_left(model, prefetch):
    peaks = {}
    for fraction in (0.0, 1.0):
        keeper = keeper_for(model, fraction, prefetch)
        for _ in range(2):
            gradients(model, keeper)
        keeper.reset_peaks()
        x = x_of()

        def step(keeper=keeper, x=x):
            with keeper.step():
                model(x).backward()

        peaks[fraction] = peak_of(step)
        moved = keeper.stats().homes["offload"].peak
        keeper.detach()
    assert moved == (DEPTH - (3 if prefetch is None else prefetch // LAYER)) * LAYER
    assert peaks[0.0] - peaks[1.0] >= 0.9 * moved


def test_the_peak_of_a_graph_falls_by_the_bytes_that_left():
    peaks = {}
    for fraction in (0.0, 1.0):
        model = fresh()
        keeper = keeper_for(model, fraction)

        def train_step(x, model=model):
            loss = model(x)
            loss.backward()
            return loss

        step = ps.GraphedStep(train_step, keeper)
        x = x_of()
        for _ in range(2):
            step(x)
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        peaks[fraction] = peak_of(lambda step=step, x=x: step(x))  # the capture: a replay allocates nothing
        step(x)
        step.wait()
        moved = keeper.stats().homes["offload"].peak
        del step, keeper, model, train_step
    assert moved == (DEPTH - 1) * LAYER
    assert peaks[0.0] - peaks[1.0] >= 0.9 * moved
