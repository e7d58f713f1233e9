"""A keeper that was detached and dropped is gone at once, with its pool and its host memory."""

from weakref import ref

import pytest
import torch
from offloaded import moving
from stack import Stack, batch, policy, run
from support import same
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import pagestash as ps
from pagestash.saved.packed import unpack

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
    if keeper._offload.moving is not None:
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


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
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
