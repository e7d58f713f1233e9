"""Eager steps on two ranks of which one meets a longer batch: the other must not take part in its overflow."""

import os

import torch
import torch.distributed as dist
from support import same
from support.processes import start_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pagestash as ps

WIDTH, LONGER = 32, 2


def net():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers)


def data(step, rank):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randn(256 if (step == LONGER and rank == 0) else 16, WIDTH, generator=generator)


def train(rank, how, on_overflow=None):
    """Weights after a few steps, the overflows that were raised, and what found no page."""
    model = net()
    runs = model
    if how == "ddp":
        runs = DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = None
    if on_overflow is not None:
        pool = ps.PoolConfig(page=256, headroom=1.0, on_overflow=on_overflow)
        rules = [ps.Rule("*", "stash", min_bytes=0)]
        keeper = ps.Keeper(ps.Policy(rules, pool), backend="torch").attach(model)
    raised = []
    for step in range(4):
        for _ in range(2):
            optimizer.zero_grad()
            try:
                if keeper is None:
                    runs(data(step, rank)).square().mean().backward()
                else:
                    with keeper.step():
                        runs(data(step, rank)).square().mean().backward()
                break
            except ps.PoolOverflow:
                raised.append(step)
        optimizer.step()
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    stayed = 0 if keeper is None else keeper.stats().no_page.groups
    if keeper is not None:
        keeper.detach()
    return weights, raised, stayed


def _rank(rank: int, path: str) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    found = {}
    for how in ("ddp", "fsdp"):
        plain, *_ = train(rank, how)
        for on_overflow in ("keep", "raise"):
            weights, raised, stayed = train(rank, how, on_overflow)
            equal = same(plain, weights)
            found[how, on_overflow] = (equal, raised, stayed > 0)
    torch.save(found, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_weights_are_those_of_a_run_without_a_keeper(tmp_path):
    start_ranks(_rank, (str(tmp_path),), 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for how in ("ddp", "fsdp"):
            # Kept: what found no page is the business of that rank alone.
            assert found[how, "keep"] == (True, [], rank == 0)
            # Raised: on both ranks, in the same step.
            assert found[how, "raise"] == (True, [LONGER], False)
