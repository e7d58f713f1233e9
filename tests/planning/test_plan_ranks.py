"""Ranks plan together: each measures the same steps, and all get the same plan."""

import sys
from pathlib import Path

import pytest
import torch
from support.tiers import slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from gloo import RUN_HERE, spawn
from support.limit import MemoryLimit
from test_keeper_budget import DEPTH, Net, peak_of, seed

import pagestash as ps
from pagestash.planning.budget import optimizer_state

pytestmark = pytest.mark.skipif(not RUN_HERE, reason="needs processes")
STEPS = 4


def trained(rank, rows, most, kind):
    """Losses and weights of a few steps, and the plan's policy and predicted peak."""
    seed()
    inner = Net()
    model = DistributedDataParallel(inner) if kind == "ddp" else inner
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, rows[rank], 64, generator=generator) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    keeper = None if most is None else ps.Keeper(budget=0.5, host=0, repeats=1).attach(model)
    seed(1 + rank)
    losses = []
    with MemoryLimit(most[rank] if most and most[rank] else 1 << 40):
        for x in batches:
            if keeper is None:
                loss = model(x)
                loss.backward()
            else:
                with keeper.step():
                    loss = model(x)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    plan = None if keeper is None else (keeper.plan.policy.to_toml(), keeper.plan.predicted.peak_bytes)
    return [*losses, *(p.detach() for p in inner.parameters())], plan


def work(rank, world, rows, most, kind):
    return trained(rank, rows, most, kind)


@pytest.mark.parametrize("kind", [*slow("ddp"), "plain"])
def test_two_ranks_one_of_which_finds_no_memory_get_one_plan_and_the_same_bits(kind):
    rows = (64, 128)
    seed()
    whole = peak_of(ps.profile(Net(), torch.randn(4, rows[1], 64), repeats=1))
    weights = sum(2 * p.nbytes for p in Net().parameters())
    with pytest.raises(torch.OutOfMemoryError), MemoryLimit(int(0.7 * whole)):
        Net()(torch.randn(4, rows[1], 64)).backward()
    plain = spawn(work, 2, rows, None, kind)
    found = spawn(work, 2, rows, (None, int(0.75 * whole) + weights), kind)
    for (values, _), (expected, _) in zip(found, plain):
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))
    (_, one), (_, other) = found
    assert one == other
    assert one[1] > 0.5 * whole  # it is for the rank with the larger batch
    assert "recompute" in one[0] or "offload" in one[0]
    assert DEPTH == 4


def fails(rank, world, what):
    model = Net()

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            if rank == 1:
                raise what
            return self.net(x)

    try:
        ps.plan(Broken(), torch.randn(4, 16, 64), budget=0.6, repeats=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("what", [ValueError("a broken layer"), torch.OutOfMemoryError("no memory")])
def test_an_error_of_one_rank_is_one_of_all(what):
    first, second = spawn(fails, 2, what)
    if isinstance(what, ValueError):
        assert first == "RuntimeError: rank 1: ValueError: a broken layer"
        assert second == "ValueError: a broken layer"
    else:
        assert first == second
        assert "a step finds no memory even with all 4 layers recomputed" in first


def state_of_sharded(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=init_device_mesh("cpu", (world,)))
    adam = torch.optim.AdamW(model.parameters())
    before = optimizer_state(adam)
    model(torch.ones(2, 64)).sum().backward()
    adam.step()
    return before, optimizer_state(adam)


def test_the_state_of_sharded_weights_counts_on_each_rank_alone():
    assert spawn(state_of_sharded, 2) == [(2 * 4 * 64 * 32,) * 2] * 2
