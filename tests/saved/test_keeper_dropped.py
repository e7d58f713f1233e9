"""A keeper that was detached and dropped is gone at once, with its pool and its host memory."""

import gc
import threading
from weakref import ref

import pytest
import torch
from offloaded import moving
from stack import POOLS, Stack, batch, policy, run
from support import same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import pagestash as ps
from pagestash.saved import hooks
from pagestash.saved.eight_bits import EightBits
from pagestash.saved.offload.moving import Offload, OffloadedGroup
from pagestash.saved.packed import unpack
from pagestash.saved.paged import PagedStash, StashedGroup
from pagestash.saved.stash import Stash
from pagestash.saved.streams import SideStream

pytestmark = pytest.mark.usefixtures("no_collector")

POLICIES = {
    "stash": policy(),
    "offload": ps.Policy([ps.Rule("layers.*", "offload", min_bytes=256, prefetch_bytes=1)]),
    "recompute": ps.Policy([ps.Rule("layers.*.norm", "recompute")]),
    "all": ps.Policy(
        [
            ps.Rule("layers.*.experts", "stash", min_bytes=256),
            ps.Rule("layers.*.norm", "recompute"),
            ps.Rule("layers.*", "offload", min_bytes=256, prefetch_bytes=1),
        ],
        ps.PoolConfig(page=256),
    ),
}


def memory_of(keeper: ps.Keeper) -> list[StorageWeakRef]:
    """The storages of the keeper's pool and of its host memory, as far as it has them."""
    found = [] if keeper.pool is None else [keeper.pool.memory.device_slab, keeper.pool.memory.state]
    if keeper._offload.plan is not None:
        found += moving(keeper).slabs._slabs
    return [StorageWeakRef(slab.untyped_storage()) for slab in found]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_a_dropped_keeper_leaves_no_memory(name, steps):
    model = Stack()
    keeper = ps.Keeper(POLICIES[name], backend="torch").attach(model)
    for _ in range(steps):
        run(model, *batch(20), keeper)
    memory, alive = memory_of(keeper), ref(keeper)
    assert bool(memory) == (steps > 0 and name != "recompute")
    keeper.detach()
    del keeper
    assert alive() is None
    assert [storage for storage in memory if not storage.expired()] == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_graph_that_was_freed_after_its_step_holds_nothing(name):
    model = Stack()
    keeper = ps.Keeper(POLICIES[name], backend="torch").attach(model)
    run(model, *batch(20), keeper)
    with keeper.step():
        loss = model(*batch(20))
    del loss
    memory, alive = memory_of(keeper), ref(keeper)
    keeper.detach()
    del keeper
    assert alive() is None
    assert [storage for storage in memory if not storage.expired()] == []


# (Under recompute a backward after its step is refused.)
@pytest.mark.parametrize(
    ("name", "backward"),
    [*((name, False) for name in POLICIES), ("stash", True), ("offload", True)],
)
def test_a_graph_that_is_freed_after_the_keeper_holds_nothing(name, backward):
    """On a GPU autograd's thread may be the last to let go of a graph, at any time after `backward` returned."""
    model = Stack()
    keeper = ps.Keeper(POLICIES[name], backend="torch").attach(model)
    for _ in range(2):
        run(model, *batch(20), keeper)
    with keeper.step():
        loss = model(*batch(20))
    memory, alive = memory_of(keeper), ref(keeper)
    assert bool(memory) == (name != "recompute")
    keeper.detach()
    del keeper
    if backward:
        loss.backward()
    del loss
    assert alive() is None
    assert [storage for storage in memory if not storage.expired()] == []


def test_a_keeper_that_is_attached_again_has_all_pages_and_host_memory_free():
    model = Stack()
    keeper = ps.Keeper(POLICIES["all"], backend="torch").attach(model)
    plain = [run(model, *batch(20), keeper) for _ in range(3)][-1]
    slabs = moving(keeper).slabs
    for _ in range(3):
        with keeper.step():
            loss = model(*batch(20))
        keeper.detach()
        del loss  # behind the keeper's last look
        keeper.attach(model)
        assert same(run(model, *batch(20), keeper), plain)
        assert keeper.pool is not None
        assert keeper.pool.live_tickets == 0
        assert slabs.used == 0


class InACycle(nn.Module):
    """What it saves of `sin` waits for the collector."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        cycle = [torch.sin(x * 2)]
        cycle.append(cycle)
        del cycle
        return x + self.linear(x).square() + self.linear(x).sin()


def test_an_entry_that_is_collected_while_its_group_is_put_leaves_the_others_their_home(monkeypatch):
    model = nn.Sequential(*(InACycle() for _ in range(3)))
    x = torch.randn(32, 64, requires_grad=True)
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", "offload", min_bytes=256, fraction=0.9)]), backend="torch")
    keeper.attach(model)

    def gradient():
        x.grad = None
        with keeper.step():
            model(x).sum().backward()
        gc.collect()
        keeper.size_pool()  # the measured step is over when all of its graph is gone
        return x.grad.clone()

    plain = gradient()
    assert torch.equal(gradient(), plain)
    admit, admitted = Offload._admit, []

    def collected(self, *args):  # the collector runs when it likes: here between two entries of a group
        admit(self, *args)
        admitted.append(gc.collect())

    monkeypatch.setattr(Offload, "_admit", collected)
    assert torch.equal(gradient(), plain)
    assert sum(admitted) > 0
    keeper.detach()


class Outputs(nn.Module):
    """Gives many tensors, each with a node of its own that has saved it."""

    def forward(self, x):
        return [(x * (number + 1)).exp() for number in range(8)]


class DropsInALoop(dict):
    """Tickets: while they are looked through, another thread lets go of an output."""

    def __init__(self, tickets, outputs):
        super().__init__(tickets)
        self.outputs = outputs

    def __iter__(self):
        for key in super().__iter__():
            thread = threading.Thread(target=self.outputs.pop)
            thread.start()
            thread.join()
            yield key


@pytest.mark.parametrize("name", ["device", "host only"])
def test_an_output_that_dies_in_another_thread_while_its_group_is_restored(name, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), Outputs())
    x = torch.randn(4, 8)
    pool = {"page": 64, **({"device": 2**20} if name == "device" else {"device": 0, "host": 2**20})}
    rules = [ps.Rule("1", "stash", min_bytes=0)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(**pool)), backend="torch").attach(model)
    restore, restored = PagedStash._restore, []

    def restore_among_others(self, group, asked):
        group.tickets = DropsInALoop(group.tickets, outputs)
        restore(self, group, asked)
        restored.append(len(group.restored))

    monkeypatch.setattr(PagedStash, "_restore", restore_among_others)
    with keeper.step():
        outputs = model(x)
        loss = outputs.pop(0).sum()
        loss.backward()
    assert restored == [8]
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model(x)[0].sum().backward()
    assert torch.equal(model[0].weight.grad, got)
    outputs.clear()
    check_nothing_waits(keeper)


def test_a_prefetch_that_outlives_its_stash_has_its_buffers_and_its_book(monkeypatch):
    """On a GPU its kernel may still be running when both are freed."""
    model = Stack()
    keeper = ps.Keeper(policy(**POOLS["host only"]), backend="torch").attach(model)
    with keeper.step():
        loss = model(*batch(20))
    stash = keeper._stash._paged
    stash._prefetch_before(stash._groups[-1])
    group = stash._groups[-2]
    wanted = [*group.incoming.values(), next(iter(group.tickets.values())).group.book]
    assert len(wanted) > 1
    keeper.detach()
    outlived = []
    monkeypatch.setattr(SideStream, "outlive", lambda self, tensors: outlived.extend(map(id, tensors)))
    del stash, group, keeper, loss
    assert outlived == [id(tensor) for tensor in wanted]


IN_A_CYCLE = {
    "stash": {"home": "stash"},
    "offload": {"home": "offload", "prefetch_bytes": 0},
    "stash, coded": {"home": "stash", "bits": 8},
    "offload, coded": {"home": "offload", "bits": 8, "prefetch_bytes": 0},
    "keep, coded": {"home": "keep", "bits": 8},
}


def keeper_in_a_cycle(name):
    """A model, its keeper, and a function that runs a step under the keeper, then collects what waits for it."""
    model = nn.Sequential(*(InACycle() for _ in range(3))).to(torch.bfloat16)
    rule = ps.Rule("*", min_bytes=256, **IN_A_CYCLE[name])
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256, headroom=2.0)), backend="torch").attach(
        model
    )
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def gradient():
        x.grad = None
        with keeper.step():
            model(x).sum().backward()
        gc.collect()
        keeper.size_pool()
        return x.grad.clone()

    return model, keeper, gradient


def check_nothing_waits(keeper):
    assert {name: home.bytes for name, home in keeper.stats().homes.items() if home.bytes} == {}
    assert not keeper._stash.live
    assert not keeper._offload.live


@pytest.mark.parametrize("measured", [True, False], ids=["measured step", "later step"])
@pytest.mark.parametrize("name", IN_A_CYCLE)
def test_an_entry_that_is_collected_before_it_has_its_place_is_dropped_there(name, measured, monkeypatch):
    _, keeper, gradient = keeper_in_a_cycle(name)
    plain = [gradient() for _ in range(0 if measured else 2)]
    collected = []
    for home in (Offload, Stash, EightBits):

        def put(self, group, put=home.put):
            collected.append(gc.collect())
            put(self, group)

        monkeypatch.setattr(home, "put", put)
    plain += [gradient() for _ in range(2)]
    assert sum(collected) > 0
    assert all(torch.equal(each, plain[0]) for each in plain)
    check_nothing_waits(keeper)
    if "keep" not in name:  # else the measured step would never be over
        assert keeper.pool is not None or keeper._offload.plan is not None


class SavedAgain(nn.Module):
    """Its layers save the same tensor, the first of them in a graph that waits for the collector."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Tanh(), nn.Softplus()])

    def forward(self, x):
        x = x * 2
        cycle = [self.layers[1](x)]
        cycle.append(cycle)
        del cycle
        return self.layers[1](x)


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_an_entry_whose_other_handles_are_collected_when_it_is_saved_again_can_be_asked_for(
    home, monkeypatch
):
    x = torch.randn(32, 64, requires_grad=True)
    model = SavedAgain()
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    policy = ps.Policy([ps.Rule("layers.*", home, min_bytes=256)], ps.PoolConfig(page=256, device="1MiB"))
    keeper = ps.Keeper(policy, backend="torch").attach(model)
    make, collected = hooks.Handle, []

    def handle(*args):  # where memory for it is allocated, the collector may run
        collected.append(gc.collect())
        return make(*args)

    monkeypatch.setattr(hooks, "Handle", handle)
    for _ in range(2):
        with keeper.step():
            (found,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(found, plain)
    assert sum(collected) > 0
    gc.collect()
    check_nothing_waits(keeper)


@pytest.mark.parametrize("name", ["stash", "offload"])
def test_an_entry_that_is_collected_while_its_failed_step_gives_it_up_is_dropped_once(name, monkeypatch):
    model, keeper, gradient = keeper_in_a_cycle(name)
    plain = [gradient() for _ in range(3)][-1]
    collected = []
    for place in (OffloadedGroup, StashedGroup):

        def drop(self, entry, drop=place.drop):
            collected.append(gc.collect())
            drop(self, entry)

        monkeypatch.setattr(place, "drop", drop)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    graphs = []

    def failing_step():
        with keeper.step():
            graphs.append(model(x))
            assert not collected
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert sum(collected) > 0
    graphs.clear()
    assert torch.equal(gradient(), plain)
    check_nothing_waits(keeper)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["stash", "offload"])
def test_a_backward_that_is_still_to_come_has_its_memory(name, steps):
    model = Stack()
    plain = run(model, *batch(20))
    keeper = ps.Keeper(POLICIES[name], backend="torch").attach(model)
    for _ in range(steps - 1):  # the last step may be the measured one
        run(model, *batch(20), keeper)
    model.zero_grad()
    torch.manual_seed(1)
    with keeper.step():
        loss = model(*batch(20))
    keeper.detach()
    del keeper
    loss.backward()
    assert same((loss.detach(), [p.grad for p in model.parameters()]), plain)


def test_an_output_that_no_backward_asks_for_is_freed_outside_all_regions():
    """As in a backward of a GPU: its thread has the hooks of the step, and no region."""
    keeper = ps.Keeper(POLICIES["offload"], backend="torch").attach(Stack())
    with torch.autograd.graph.saved_tensors_hooks(keeper._saved.pack, unpack):
        x = torch.randn(4, requires_grad=True)
        y = x.sigmoid()  # saves its own output
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
        y = x.sigmoid()
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach() * (1 - y.detach()))


def test_an_output_of_a_subclass_that_no_backward_asks_for_is_freed():
    keeper = ps.Keeper(POLICIES["offload"], backend="torch").attach(Stack())
    with keeper.step():
        x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
        y = x.sigmoid()
        storage = StorageWeakRef(y.a.untyped_storage())
        del y
        assert storage.expired()
