"""Boundary tensors are freed when nobody needs them, never when somebody does, and gradients stay the same."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).parent))
from live import Live

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.models import Decoder, preset
from pagestash.moe import AllGather, AllToAll, MoEConfig, Received
from pagestash.moe import experts as layer
from pagestash.moe.layer import MoE
from pagestash.moe.parallel import alltoall, collectives
from pagestash.moe.parallel.collectives import Ranks
from pagestash.pages.pool import PagePool
from pagestash.pipeline import early_free
from pagestash.saved.early_free import Release


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    monkeypatch.setattr("pagestash.kernels.backend.interpreted", lambda: False)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A backend's thread may be slow, however busy the machine is; after this time it hangs."""
    monkeypatch.setattr(collectives, "_PATIENCE", 600.0)


def size(tensor):
    return tensor.untyped_storage().nbytes()


def reference(tensor):
    """Holds a reference that torch counts, as a backend's thread does: a node that saved the tensor."""
    with torch.enable_grad():
        return tensor * torch.ones(1, requires_grad=True)


# --- the rule ---


def test_a_tensor_that_only_records_hold_is_freed_and_its_gradient_flows():
    w = torch.randn(4, 4, requires_grad=True)
    out = w * 2  # saves neither its result nor, for a number, its input
    record = {"boundary": out}
    sent = out + 1
    assert early_free(out)
    assert size(record["boundary"]) == 0
    assert out.shape == (4, 4)
    sent.sum().backward()
    assert torch.equal(w.grad, torch.full((4, 4), 2.0))


def test_rows_cut_from_a_forgotten_buffer_are_freed():
    rows = torch.empty(8, 4)[:5]
    assert early_free(rows)
    assert size(rows) == 0


def saved_as_input(x):
    return x, x * x


def saved_by_its_own_node(x):
    y = torch.tanh(x)
    return y, None


def seen_through_a_view(x):
    return x, x[1:]


def detached_elsewhere(x):
    return x, x.detach()


def a_view_of_what_is_in_use(x):
    return x[1:], x


def a_parameter(x):
    return torch.nn.Parameter(x.detach().clone()), None


def a_leaf(x):
    return x.detach().clone().requires_grad_(), None


def memory_of_numpy(x):
    return torch.from_numpy(x.detach().numpy().copy()), None


NEEDED = [
    saved_as_input,
    saved_by_its_own_node,
    seen_through_a_view,
    detached_elsewhere,
    a_view_of_what_is_in_use,
    a_parameter,
    a_leaf,
    memory_of_numpy,
]


@pytest.mark.parametrize("make", NEEDED, ids=lambda make: make.__name__)
def test_what_somebody_needs_is_left_alone(make):
    w = torch.randn(6, 4, requires_grad=True)
    tensor, other = make(w * 3)
    before, kept = size(tensor), tensor.detach().clone()
    release = early_free(tensor)
    assert not release
    assert release.reason
    assert size(tensor) == before > 0
    assert torch.equal(tensor, kept)
    del other


def test_what_was_saved_is_freed_once_the_graph_is_gone():
    w = torch.randn(4, requires_grad=True)
    x = w * 2
    loss = (x * x).sum()
    assert not early_free(x)
    loss.backward()
    assert early_free(x)


def test_hooks_that_may_hold_the_object_itself_are_respected():
    w = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x = w * 2
        loss = (x * x).sum()
        assert not early_free(x)
    loss.backward()
    assert torch.equal(w.grad, 8 * w.detach())


def test_a_keeper_holds_what_it_keeps():
    model = torch.nn.Linear(4, 4)
    keeper = ps.Keeper(ps.Policy()).attach(model)
    with keeper.step():
        x = model(torch.ones(2, 4))
        kept = x * x
        free = model(torch.ones(2, 4))
        _ = free + 1
        assert not early_free(x)
        assert early_free(free)
        kept.sum().backward()
    assert torch.isfinite(model.weight.grad).all()


# --- collectives that still read ---


@pytest.mark.usefixtures("lone_rank")
def test_what_a_collective_reads_is_freed_when_it_is_waited_for(monkeypatch):
    monkeypatch.setattr("pagestash.saved.early_free._PATIENCE", 600.0)
    sent, arrived = torch.randn(64, 8), torch.empty(64, 8)
    expected = sent.clone()
    release = early_free(sent, after=dist.all_to_all_single(arrived, sent, async_op=True))
    assert not release
    assert size(sent) > 0
    assert release.wait()
    assert size(sent) == 0
    assert torch.equal(arrived, expected)
    assert release.wait()  # a second wait changes nothing


@pytest.mark.usefixtures("lone_rank")
def test_what_a_collective_reads_and_backward_needs_stays():
    w = torch.randn(8, 8, requires_grad=True)
    sent = w * 2
    loss = (sent * sent).sum()
    arrived = torch.empty(8, 8)
    release = early_free(sent, after=dist.all_to_all_single(arrived, sent.detach(), async_op=True))
    assert not release.wait()
    loss.backward()
    assert torch.equal(w.grad, 8 * w.detach())


def test_what_was_sent_is_freed_when_the_backend_drops_its_reference(monkeypatch):
    rows = torch.randn(8, 8)
    held = [reference(rows)]
    waiting = SimpleNamespace(perf_counter=lambda: 0.0, sleep=lambda _: held.clear())
    monkeypatch.setattr("pagestash.saved.early_free.time", waiting)
    assert not early_free(rows)
    assert early_free(rows, sent=True)


# --- the points of the MoE layer ---

KINDS = {
    "gather": lambda config: AllGather(config, max_tokens=32),
    "padded": lambda config: AllToAll(config, max_tokens=32),
    "exact": lambda config: AllToAll(config, padded=False),
}
CONFIG = MoEConfig(width=32, expert_width=16, experts=4, top_k=2)


def make_layer(kind, pooled):
    pool = PagePool(torch.device("cpu"), 1024, device_pages=256, backend="torch") if pooled else None
    torch.manual_seed(0)
    return MoE(CONFIG, dispatch=KINDS[kind](CONFIG), pool=pool)


class Calls(nn.Module):
    """A region around the experts of a layer."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, *args):
        return self.moe.experts(*args)


def forward_and_back(moe, experts=None):
    """Result and gradients."""
    torch.manual_seed(1)
    x = torch.randn(32, 32, requires_grad=True)
    weights = torch.rand(32, 2, requires_grad=True)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(32)]).to(torch.int32)
    y = (experts or moe.experts)(x * 1, weights, ids)
    y.square().sum().backward()
    projections = [p.grad for part in (moe.expert_fc1, moe.expert_fc2) for p in part.parameters()]
    return [y.detach(), x.grad, weights.grad, *projections]


@pytest.fixture
def releases(monkeypatch):
    """What every call of `early_free` in the MoE layer came to, by the file that made it."""
    found = {"layer": [], "dispatch": []}
    for module, name in ((layer, "layer"), (alltoall, "dispatch")):

        def noted(tensor, name=name, **how):
            release = early_free(tensor, **how)
            found[name].append((release.freed, size(tensor)))
            return release

        monkeypatch.setattr(module, "early_free", noted)
    return found


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_received_tokens_go_after_the_experts(kind, pooled, releases):
    """The experts gather their rows from them, and save those."""
    forward_and_back(make_layer(kind, pooled))
    assert releases["layer"] == [(True, 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_received_tokens_stay_where_the_layer_is_run_again(kind, releases):
    moe = make_layer(kind, pooled=False)
    plain = forward_and_back(make_layer(kind, pooled=False))
    releases["layer"].clear()
    keeper = ps.Keeper(ps.Policy([ps.Rule("moe", "recompute")])).attach(nn.ModuleDict({"moe": Calls(moe)}))
    torch.manual_seed(1)
    with keeper.step():
        results = forward_and_back(moe, keeper._attached.models[0]["moe"])
    assert releases["layer"] == []
    assert same(results, plain)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", ["padded", "exact"])
@pytest.mark.usefixtures("lone_rank")
def test_expert_outputs_go_before_the_results_are_summed(kind, pooled, releases):
    forward_and_back(make_layer(kind, pooled))
    assert releases["dispatch"] == [(True, 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_a_backend_that_is_slow_to_drop_its_references_is_waited_for(kind, releases, monkeypatch):
    """Gloo's thread has them for a moment after a collective is over."""
    held, waits = [], []

    def slow(collective):
        def run(out, given, *args, **kwargs):
            collective(out, given, *args, **kwargs)
            held.extend(reference(tensor) for tensor in (out, given))

        return run

    def wait(seconds):
        waits.append(len(held))
        held.clear()
        time.sleep(seconds)

    for owner, name in ((collectives, "_all_gather"), (dist, "all_to_all_single")):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    monkeypatch.setattr(collectives, "sleep", wait)
    forward_and_back(make_layer(kind, pooled=False))
    assert releases["layer"] == [(True, 0)]
    assert releases["dispatch"] == ([] if kind == "gather" else [(True, 0)])
    assert 2 in waits


@pytest.mark.parametrize("kind", ["padded", "exact"])
@pytest.mark.usefixtures("lone_rank")
def test_permuted_tokens_are_gone_when_they_have_been_sent(kind, monkeypatch):
    permuted, gone = [], []
    permute, route = alltoall.permute, alltoall.route

    def noted(*args):
        rows = permute(*args)
        permuted.append(StorageWeakRef(rows.untyped_storage()))
        return rows

    def after(*args, **kwargs):
        gone.extend(reference.expired() for reference in permuted)
        return route(*args, **kwargs)

    monkeypatch.setattr(alltoall, "permute", noted)
    monkeypatch.setattr(
        alltoall, "route", after
    )  # once before the tokens are permuted, once when they arrive
    forward_and_back(make_layer(kind, pooled=False))
    assert gone == [True]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_gradients_are_the_same_to_the_last_bit(kind, pooled, monkeypatch):
    freed = forward_and_back(make_layer(kind, pooled))
    for module in (layer, alltoall):
        monkeypatch.setattr(module, "early_free", lambda tensor, **how: Release(None))
    for ours, plain in zip(freed, forward_and_back(make_layer(kind, pooled)), strict=True):
        assert torch.equal(ours, plain)


class HandsOn:
    """A dispatch with nothing to move: every row goes to the one expert, and the caller's tensor is the rows."""

    experts, capacity = 1, None

    def send(self, x, ids, weights, over):
        return Received(x, weights, ids, route(ids, 1))

    def collect(self, rows, received):
        return rows

    def grow_capacity(self, **_):
        return False


def test_a_dispatch_that_hands_on_the_callers_tensor_frees_nothing():
    config = MoEConfig(width=32, expert_width=16, experts=1, top_k=1)
    pool = PagePool(torch.device("cpu"), 1024, device_pages=256, backend="torch")
    experts = MoE(config, dispatch=HandsOn(), pool=pool).experts
    x = torch.randn(8, 32, requires_grad=True) * 1
    kept = x.detach().clone()
    y = experts(x, torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int32))
    assert torch.equal(x, kept)
    y.sum().backward()


# --- figures ---


def alive_at(kind, monkeypatch, frees_in, moment):
    """Bytes alive at a moment of the layer's forward, with `early_free` at work in the named places alone."""
    figures, live = [], Live()
    owner, name = moment
    inner = getattr(owner, name)

    def noted(*args, **kwargs):
        figures.append(live.bytes())
        return inner(*args, **kwargs)

    with monkeypatch.context() as patch:
        for module, place in ((layer, "layer"), (alltoall, "dispatch")):
            free = early_free if place in frees_in else lambda tensor, **how: None
            patch.setattr(module, "early_free", free)
        patch.setattr(owner, name, noted)
        experts = make_layer(kind, pooled=True).experts
        with live:
            torch.manual_seed(1)
            ids = torch.stack([torch.randperm(4)[:2] for _ in range(32)]).to(torch.int32)
            experts(torch.randn(32, 32, requires_grad=True) * 1, torch.rand(32, 2), ids)
    return figures[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_received_tokens_are_a_buffer_less_while_the_results_travel(kind, monkeypatch):
    travel = (Ranks, "reduce_scatter" if kind == "gather" else "all_to_all")
    held = alive_at(kind, monkeypatch, (), travel)
    less = held - alive_at(kind, monkeypatch, ("layer",), travel)
    assert less >= 32 * 32 * 4  # at least the tokens; a wire's slots are padded
    if kind == "gather":
        assert less == 32 * 32 * 4


@pytest.mark.parametrize("kind", ["padded", "exact"])
@pytest.mark.usefixtures("lone_rank")
def test_expert_outputs_are_a_buffer_less_while_the_results_are_summed(kind, monkeypatch):
    moment = (alltoall, "combine")
    less = alive_at(kind, monkeypatch, (), moment) - alive_at(kind, monkeypatch, ("dispatch",), moment)
    assert less >= 64 * 32 * 4  # 32 tokens of 2 choices


def test_no_logits_outlive_the_loss():
    config = preset(
        "tiny", layers=2, vocab=4096, width=32, heads=2, kv_heads=1, dense_width=32, expert_width=16
    )
    model = Decoder(config)
    model.initialise(0)
    tokens = torch.randint(4096, (2, 64))
    logits = 128 * 4096 * 4
    with Live() as live:
        loss, aux = model(tokens, tokens)
        # The weight's gradient, computed with the loss, is the largest: 4096 x 32 numbers.
        assert max(live.sizes()) == 4096 * 32 * 4 < logits
        (loss + aux).backward()
