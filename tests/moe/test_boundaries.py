"""What crosses to other ranks is freed as soon as it has been sent and read, while the step goes on."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import same
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))
from live import Live

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.models import Decoder, preset
from pagestash.moe import AllGather, AllToAll, MoEConfig, Received
from pagestash.moe.layer import MoE
from pagestash.moe.parallel import alltoall
from pagestash.moe.parallel.collectives import UnderWay
from pagestash.pages.pool import PagePool
from pagestash.pipeline import early_free

KINDS = {
    "gather": lambda config: AllGather(config, max_tokens=32),
    "padded": lambda config: AllToAll(config, max_tokens=32),
    "exact": lambda config: AllToAll(config, padded=False),
}
CONFIG = MoEConfig(width=32, expert_width=16, experts=4, top_k=2)
TOKENS_BYTES = 32 * 32 * 4
SLOTS_BYTES = 2 * TOKENS_BYTES


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


class Wire:
    """Notes every collective that starts, and which of the tensors that were sent before are still alive."""

    def __init__(self, monkeypatch):
        self.sent = []
        self.alive = []
        start = UnderWay.__init__

        def noted(under_way, what, result, sent, launch):
            self.look()
            self.sent.append((what.split()[-1], sent.nbytes, Storage(sent)))
            start(under_way, what, result, sent, launch)

        monkeypatch.setattr(UnderWay, "__init__", noted)

    def look(self):
        self.alive.append([each[:2] for each in self.sent if each[2].alive()])


class Storage:
    """Whether a tensor's memory is held. Gloo's thread holds it for a moment after a collective is over."""

    def __init__(self, tensor):
        self._ref = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())

    def alive(self):
        until = time.perf_counter() + 0.2
        while not self._ref.expired() and time.perf_counter() < until:
            time.sleep(1e-3)
        return not self._ref.expired()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", ["padded", "exact"])
@pytest.mark.usefixtures("lone_rank")
def test_what_was_sent_is_gone_when_the_next_is_sent(kind, pooled, monkeypatch):
    """Sorted tokens when their experts' results are sent, those when the gradient is, and so on."""
    moe, wire = make_layer(kind, pooled), Wire(monkeypatch)
    forward_and_back(moe)
    sizes = [(what, size) for what, size, _ in wire.sent]
    slots = ("all_to_all", SLOTS_BYTES if kind == "exact" else 32 * 2 * 32 * 4)
    assert sizes.count(slots) == 4  # both ways, forward and backward
    for sent, alive in zip(wire.sent, wire.alive):
        if sent[:2] == slots:
            assert slots not in alive
    wire.look()
    assert wire.alive[-1] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_received_tokens_are_gone_while_the_results_travel(kind, monkeypatch):
    """The experts gather their rows from them, and save those."""
    moe, received, alive = make_layer(kind, pooled=True), [], []
    send, collect = moe.experts.dispatch.send, moe.experts.dispatch.collect

    def noted_send(*args):
        found = send(*args)
        received.append(Storage(found.slots))
        return found

    def noted_collect(slots, found):
        alive.append(received[0].alive())
        return collect(slots, found)

    monkeypatch.setattr(moe.experts.dispatch, "send", noted_send)
    monkeypatch.setattr(moe.experts.dispatch, "collect", noted_collect)
    forward_and_back(moe)
    assert alive == [False]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", ["padded", "exact"])
@pytest.mark.usefixtures("lone_rank")
def test_expert_outputs_are_gone_while_the_results_are_summed(kind, pooled, monkeypatch):
    moe, outputs, alive = make_layer(kind, pooled), [], []
    combine, collect = alltoall.combine, moe.experts.dispatch.collect

    def noted_combine(*args, **kwargs):
        alive.extend(each.alive() for each in outputs)
        return combine(*args, **kwargs)

    def noted_collect(slots, received):
        outputs.append(Storage(slots))
        given = [slots]
        del slots
        return collect(given.pop(), received)

    monkeypatch.setattr(alltoall, "combine", noted_combine)
    monkeypatch.setattr(moe.experts.dispatch, "collect", noted_collect)
    forward_and_back(moe)
    assert alive[0] is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_received_tokens_stay_where_the_layer_is_run_again(kind):
    moe = make_layer(kind, pooled=False)
    plain = forward_and_back(make_layer(kind, pooled=False))
    keeper = ps.Keeper(ps.Policy([ps.Rule("moe", "recompute")])).attach(nn.ModuleDict({"moe": Calls(moe)}))
    torch.manual_seed(1)
    with keeper.step():
        results = forward_and_back(moe, keeper._attached.models[0]["moe"])
    assert same(results, plain)


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


# --- a wire that is held back ---


class HeldBack:
    """Collectives of one rank whose result is there only when they are waited for, and NaN before."""

    def __init__(self, out, given):
        self._out, self._given, self._before = out, given, given.clone()
        if out.is_floating_point():
            out.fill_(torch.nan)
        else:
            out.fill_(torch.iinfo(out.dtype).max)

    def wait(self):
        assert torch.equal(self._given, self._before), "what was sent has changed on the way"
        self._out.copy_(self._given)


@pytest.fixture
def held_back(monkeypatch):
    def collective(out, given, *_, group=None, async_op=False):
        assert async_op
        return HeldBack(out, given)

    for owner, name in (
        (dist, "all_to_all_single"),
        ("pagestash.moe.parallel.collectives", "_all_gather"),
        ("pagestash.moe.parallel.collectives", "_reduce_scatter"),
    ):
        if isinstance(owner, str):
            owner = sys.modules[owner]
        monkeypatch.setattr(owner, name, collective)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank")
def test_nobody_reads_what_has_not_arrived(kind, request):
    plain = forward_and_back(make_layer(kind, pooled=False))
    request.getfixturevalue("held_back")
    assert same(forward_and_back(make_layer(kind, pooled=False)), plain)


@pytest.mark.parametrize("kind", ["gather", "padded"])
@pytest.mark.usefixtures("lone_rank", "held_back")
def test_without_the_wait_what_has_not_arrived_is_read(kind, monkeypatch):
    monkeypatch.setattr(HeldBack, "wait", lambda self: None)
    dispatch = make_layer(kind, pooled=False).experts.dispatch
    ids = torch.zeros(32, 2, dtype=torch.int32)
    assert dispatch.send(torch.randn(32, 32), ids, torch.rand(32, 2), None).slots.isnan().any()


@pytest.mark.usefixtures("lone_rank", "held_back")
def test_shared_experts_run_while_the_tokens_travel(monkeypatch):
    config = MoEConfig(width=32, expert_width=16, experts=4, top_k=2, shared_experts=1)
    moe = MoE(config, dispatch=AllToAll(config, max_tokens=32))
    order = []
    for name, owner in (("wait", HeldBack), ("forward", type(moe.shared_experts))):
        inner = getattr(owner, name)

        def noted(*args, inner=inner, name=name):
            order.append(name)
            return inner(*args)

        monkeypatch.setattr(owner, name, noted)
    y, _ = moe(torch.randn(32, 32))
    assert order == ["forward", "wait", "wait", "wait"]
    assert y.isfinite().all()
    y.sum().backward()
    assert moe.shared_experts.up.grad.isfinite().all()


# --- what early_free has become ---


def test_early_free_says_that_it_does_nothing():
    rows, waited = torch.ones(4), []
    with pytest.warns(DeprecationWarning, match="frees nothing any more"):
        release = early_free(rows, after=SimpleNamespace(wait=lambda: waited.append(True)))
    assert not release
    assert not release.wait().freed
    release.wait()
    assert waited == [True]
    assert rows.untyped_storage().nbytes() == 16
