"""A stash rule with a `fraction`: expected rows go to the host by the copy engine, excess rows to pages."""

import sys
import weakref
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from support import same
from support.tiers import slow
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.rows import padded_rows
from pagestash.moe import MoE, MoEConfig, Received, received
from pagestash.saved.offload import transfers
from pagestash.saved.offload.transfers import Transfers
from pagestash.saved.streams import SideStream
from pagestash.train.prepare import splits_backward

sys.path.insert(0, str(Path(__file__).parents[1] / "saved"))
from offloaded import nothing_left
from support.steps import training_step

D, N, E, K, T, DEPTH, EXPECTED = 32, 24, 4, 2, 48, 5, 60
ROW = (D + 2 * N) * 4
BOTH, EACH = ("experts",), ("expert_fc1", "moe_act")


class Loopback:
    """A dispatch whose wire ends where it starts, with room for twice the rows; `tokens` have experts here."""

    experts = E

    def __init__(self, expected):
        self.expected, self.tokens = expected, T

    def send(self, x, ids, weights, over):
        here = (torch.arange(T) < self.tokens)[:, None]
        ids = torch.where(here, ids, -1)
        return Received(x, weights, ids, route(ids, E, capacity=2 * T * K, over=over), self.expected)

    def collect(self, slots, received):
        return slots

    def grow_capacity(self, **_):
        return False


class Stack(nn.Module):
    def __init__(self, expected=EXPECTED) -> None:
        super().__init__()
        torch.manual_seed(0)
        chosen = "auto" if expected == "auto" else 0
        config = MoEConfig(width=D, expert_width=N, experts=E, top_k=K, expected_rows=chosen)
        self.wire = Loopback(expected)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(D), "moe": MoE(config, dispatch=self.wire)})
            for _ in range(DEPTH)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["moe"](layer["norm"](x))[0]
        return x.square().mean()


def rules(names=BOTH, home="stash", **fields):
    fields = {"min_bytes": 2048, "fraction": 1.0, "prefetch_bytes": 0, **fields}
    return [ps.Rule(f"layers.*.moe.{name}", home, **fields) for name in names]


def keeper_for(model, found, **pool):
    return ps.Keeper(ps.Policy(found, ps.PoolConfig(page=1024, **pool)), backend="torch").attach(model)


def run(model, keeper=None, tokens=T, microbatches=1):
    """The losses and gradients of a step whose backwards all come after its forwards."""
    model.zero_grad()
    model.wire.tokens = tokens
    xs = torch.randn(microbatches, T, D, generator=torch.Generator().manual_seed(7))
    with nullcontext() if keeper is None else keeper.step():
        losses = [model(x) for x in xs]
        for loss in reversed(losses):
            loss.backward()
    return [*(loss.detach() for loss in losses), *(p.grad.clone() for p in model.parameters())]


@cache
def kept(expected, tokens):
    """What a step without a keeper gives."""
    return run(Stack(expected), tokens=tokens)


@pytest.mark.parametrize("names", [pytest.param(BOTH, marks=pytest.mark.slow), EACH])
@pytest.mark.parametrize(("fraction", "prefetch"), [(0.3, 0), (1.0, 0), (1.0, 30_000), (1.0, None)])
@pytest.mark.parametrize("expected", [EXPECTED, *slow(T * K, 2 * T * K)])
def test_the_same_bits_whatever_leaves(names, fraction, prefetch, expected):
    model = Stack(expected)
    keeper = keeper_for(model, rules(names, fraction=fraction, prefetch_bytes=prefetch))
    for tokens in (T, T, 10, 40, T):  # fewer rows than are expected, and more again
        assert same(run(model, keeper, tokens), kept(expected, tokens))
        nothing_left(keeper)


def test_expected_rows_wait_on_the_host_and_excess_rows_in_pages():
    model = Stack()
    keeper = keeper_for(model, rules())
    run(model, keeper)
    with keeper.step():
        loss = model(torch.randn(T, D))
        homes, offload = {home: int(size) for home, size in keeper.held().items()}, keeper.stats().offload
        loss.backward()
    assert homes["stash"] == DEPTH * (T * K - EXPECTED) * ROW
    assert homes["offload"] == (DEPTH - 1) * EXPECTED * ROW  # the last layer's backward comes at once
    assert offload.host_bytes >= homes["offload"]
    assert offload.refused_peak == 0
    nothing_left(keeper)


def test_what_left_is_gone_from_the_device(monkeypatch):
    """Seen from the operation, which makes the buffers: their storages are freed."""
    alive = []
    made = received.permute_split

    def noting(*args, **kwargs):
        expected, excess = made(*args, **kwargs)
        alive.append(weakref.ref(expected.untyped_storage()))
        return expected, excess

    monkeypatch.setattr(received, "permute_split", noting)
    for fraction, living in ((0.0, DEPTH), (1.0, 1)):
        model = Stack()
        window = {} if fraction else {"prefetch_bytes": None}
        keeper = keeper_for(model, rules(EACH[:1], fraction=fraction, **window))
        run(model, keeper)
        alive.clear()
        with keeper.step():
            loss = model(torch.randn(T, D))
            assert sum(storage() is not None for storage in alive) == living
            kept = keeper.stats().regions["layers.0.moe.expert_fc1"].bytes
            loss.backward()
        head = EXPECTED * D * 4 if fraction else padded_rows(EXPECTED) * D * 4  # the host needs no padding
        assert kept == head + (T * K - EXPECTED) * D * 4


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_a_fraction_is_of_the_bytes_of_expected_rows(fraction):
    model = Stack()
    keeper = keeper_for(model, rules(fraction=fraction))
    run(model, keeper)
    with keeper.step():
        loss = model(torch.randn(T, D))
        moved = int(keeper.held()["offload"])
        loss.backward()
    total, layer = DEPTH * EXPECTED * ROW, EXPECTED * ROW
    assert fraction * total - 2 * layer <= moved <= fraction * total + layer


def test_without_a_fraction_nothing_leaves():
    model = Stack()
    rule = ps.Rule("layers.*.moe.experts", "stash", min_bytes=2048)
    assert rule.for_expected_rows() is None
    keeper = keeper_for(model, [rule])
    for _ in range(2):
        run(model, keeper)
    assert keeper.stats().homes["offload"].peak == 0
    assert keeper.stats().offload is None


@pytest.mark.parametrize("names", [BOTH, *slow((EACH,))])
def test_microbatches_that_wait_together(names):
    model = Stack()
    keeper = keeper_for(model, rules(names))
    for microbatches in (3, 3, 2, 4):
        assert same(run(model, keeper, microbatches=microbatches), run(model, microbatches=microbatches))
        nothing_left(keeper)


def test_a_backward_that_comes_twice():
    model, x = Stack(), torch.randn(T, D)
    keeper = keeper_for(model, rules())
    run(model, keeper)
    found = []
    for own in (None, keeper):
        model.zero_grad()
        with nullcontext() if own is None else own.step():
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert same(*found)
    nothing_left(keeper)


@pytest.mark.parametrize(
    "others",
    [
        [ps.Rule("layers.*.moe.moe_act", "recompute")],
        [ps.Rule("layers.*.moe", "recompute")],
        [ps.Rule("layers.*", "recompute")],
    ],
    ids=["projection", "experts", "layer"],
)
def test_expected_rows_leave_from_inside_what_is_recomputed(others):
    class Layers(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(layer) for layer in self.layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    class Layer(nn.Module):
        def __init__(self, parts) -> None:
            super().__init__()
            self.norm, self.moe = parts["norm"], parts["moe"]

        def forward(self, x):
            return x + self.moe(self.norm(x))[0]

    model = Layers()
    keeper = keeper_for(model, [*rules(EACH[:1]), *others])
    for _ in range(3):
        assert same(run(model, keeper), run(model))
    assert keeper.stats().homes["offload"].peak >= (DEPTH - 1) * EXPECTED * D * 4
    nothing_left(keeper)


@pytest.mark.parametrize("pages", [1, 9, 30])
def test_excess_rows_that_find_no_page_stay_and_expected_rows_leave_all_the_same(pages):
    model = Stack()
    keeper = keeper_for(model, rules(), device=pages * 1024, headroom=1.0)
    for _ in range(3):
        assert same(run(model, keeper), run(model))
        nothing_left(keeper)
    assert keeper.stats().homes["offload"].peak == (DEPTH - 1) * EXPECTED * ROW


def test_a_step_that_overflows_is_run_again_to_the_same_bits():
    """Received rows are required: the pool of a step with fewer of them is too small."""
    ends = []
    for leaves in (False, True):
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        found = rules() if leaves else rules(fraction=0.0, prefetch_bytes=None)
        keeper = keeper_for(model, found, headroom=1.0)
        step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
        losses = []
        for number, tokens in enumerate((32, 32, T, 40, T)):
            model.wire.tokens = tokens
            losses.append(step(torch.randn(T, D, generator=torch.Generator().manual_seed(number))))
        assert step.reruns == 1
        ends.append([*losses, *(p.detach().clone() for p in model.parameters())])
    assert same(*ends)
    assert keeper.stats().homes["offload"].peak > 0
    nothing_left(keeper)


def test_expected_rows_that_a_capture_is_the_first_to_see_stay(monkeypatch):
    """Offload measures its first step, for which it waits for the device: no capture may do that."""
    model = Stack()
    plain = run(model)
    keeper = keeper_for(model, rules(), device=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("pagestash.saved.offload.moving.capturing", lambda: True)
        assert same(run(model, keeper), plain)
    assert keeper.stats().homes["offload"].peak == 0
    assert keeper.stats().homes["keep"].peak >= DEPTH * EXPECTED * ROW
    for _ in range(2):
        assert same(run(model, keeper), plain)
    assert keeper.stats().homes["offload"].peak == (DEPTH - 1) * EXPECTED * ROW
    nothing_left(keeper)


def test_expected_rows_that_the_keeper_chooses_leave_too():
    found = []
    for fraction in (0.0, 1.0):
        model = Stack("auto")
        window = {} if fraction else {"prefetch_bytes": None}
        keeper = keeper_for(model, rules(fraction=fraction, **window), headroom=2.0)
        found.append([run(model, keeper, tokens) for tokens in (40, 44, 40, T, 36, 40)])
        moved = keeper.stats().homes["offload"].peak
    assert same(*found)
    assert moved == (DEPTH - 1) * model.layers[0]["moe"].experts.received_rows.expected * ROW > 0
    nothing_left(keeper)


@pytest.mark.skipif(not splits_backward(), reason="this torch cannot split a custom function's backward")
@pytest.mark.parametrize("names", [BOTH, EACH])
def test_both_halves_of_a_split_backward_ask_for_them(names):
    def halves(keeper=None):
        model.zero_grad()
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with nullcontext() if keeper is None else keeper.step():
            loss = model(x)
            (dx,), groups = stage_backward_input([loss], None, [x], model.parameters())
            stage_backward_weight(model.parameters(), groups)
        return [dx, *(p.grad.clone() for p in model.parameters())]

    model = Stack()
    plain = halves()
    keeper = keeper_for(model, rules(names))
    for _ in range(3):
        assert same(halves(keeper), plain)
    assert keeper.stats().homes["offload"].peak > 0
    nothing_left(keeper)


# --- copies that come as late as their events allow ---------------------------------------------------------


class LateEvent:
    """Done when somebody waits for it, and not before."""

    device = torch.device("cpu")

    def __init__(self, copy):
        self.copy = copy

    def wait(self):
        if self.copy is not None:
            self.copy()
        self.copy = None


class LateCopies:
    """A copy engine that copies when somebody waits for it, and not before; until then the target is NaN.

    So it shows if a source is let go or written over too early, and if host memory or a buffer is read too early.
    """

    def __init__(self, monkeypatch):
        self.out = self.back = 0
        monkeypatch.setattr(Transfers, "move_out", lambda of, *args: self.move_out(of, *args))
        monkeypatch.setattr(Transfers, "fetch", lambda of, *args: self.fetch(*args))
        monkeypatch.setattr(transfers, "is_done", lambda event: event is not None and event.copy is None)
        monkeypatch.setattr(transfers, "wait_here", lambda event: None if event is None else event.wait())
        monkeypatch.setattr(SideStream, "join", lambda stream: None)

    def move_out(self, transfers, group, entries):
        for entry in entries:
            self.out += 1
            on_host(group, entry).view(torch.int32).fill_(0x7FC00000)

        def copy():
            for entry, origin in group.sources:  # none, if they were let go before
                there = on_host(group, entry)
                flat = origin.untyped_storage()
                there.copy_(torch.tensor([], dtype=torch.uint8).set_(flat, entry.first, there.shape))

        group.left = LateEvent(copy)
        group.sources = [(entry, entry.origin) for entry in entries]
        group.held.leaving_bytes = sum(origin.untyped_storage().nbytes() for _, origin in group.sources)
        transfers._leaving.append(group)

    def fetch(self, group, entries):
        buffers = {entry: torch.empty(entry.length // 4).view(torch.uint8) for entry in entries}
        self.back += len(buffers)

        def copy():
            group.left.wait()  # the in stream waits for the copy out
            for entry, buffer in buffers.items():
                there = on_host(group, entry)
                buffer[: len(there)] = there

        group.arrived = LateEvent(copy)
        group.incoming |= buffers


def on_host(group, entry):
    host = group.members[entry].host
    return host.view(-1).view(torch.uint8)


@pytest.mark.parametrize("names", [pytest.param(BOTH, marks=pytest.mark.slow), EACH])
@pytest.mark.parametrize("prefetch", [0, 20_000, 60_000])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_copies_may_come_as_late_as_their_events_allow(monkeypatch, names, prefetch, microbatches):
    model = Stack()
    plain = run(model, microbatches=microbatches)
    keeper = keeper_for(model, rules(names, prefetch_bytes=prefetch))
    run(model, keeper, microbatches=microbatches)
    late = LateCopies(monkeypatch)
    for _ in range(2):
        assert same(run(model, keeper, microbatches=microbatches), plain)
        nothing_left(keeper)
    assert late.out == late.back > 0


@pytest.mark.parametrize("fault", ["let go", "use"])
def test_a_missing_wait_would_be_noticed(monkeypatch, fault):
    model = Stack()
    plain = run(model)
    keeper = keeper_for(model, rules())
    run(model, keeper)
    LateCopies(monkeypatch)
    if fault == "use":
        monkeypatch.setattr(Transfers, "wait_for", lambda transfers, group: None)
    else:

        def let_go(transfers, *, over=False):
            transfers._leaving.popleft().sources = []

        monkeypatch.setattr(Transfers, "let_go", let_go)
    assert not same(run(model, keeper), plain)
