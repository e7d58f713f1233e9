"""FSDP2 gives parameters new storage in forward; the keeper must still know them for weights."""

import os

import torch
import torch.distributed as dist
from support import same
from support.processes import start_ranks
from torch import nn

import pagestash as ps

WORLD, WIDTH = 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def _train(rank: int, keep: bool, reshard: bool):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block.up, reshard_after_forward=reshard)  # a unit inside the region
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pool = ps.PoolConfig(page=256, headroom=1.0)
    keeper = ps.Keeper(ps.Policy([ps.Rule("*", "stash", min_bytes=16)], pool), backend="torch")
    if keep:
        keeper.attach(model)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, WIDTH)
        with keeper.step():
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [p.to_local().detach().clone() for p in model.parameters()]
    peak = keeper.stats().homes["stash"].peak if keep else 0
    in_use = keeper.stats().pool.device.in_use if keep else 0
    return losses, weights, peak, in_use


def _rank(rank: int, path: str) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=WORLD)
    result = []
    for reshard in (True, False):
        plain, kept = (_train(rank, keep, reshard) for keep in (False, True))
        equal = same(plain[0] + plain[1], kept[0] + kept[1])
        result.append((equal, kept[2], kept[3]))
    torch.save(result, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_sharded_parameters_are_not_stashed_and_training_is_the_same_to_the_last_bit(tmp_path):
    start_ranks(_rank, (str(tmp_path),), WORLD)
    # A block saves its input, the first projection's result and the activation: 8 rows of 16, 64 and 64 floats.
    activations = 3 * 8 * 4 * (WIDTH + 4 * WIDTH + 4 * WIDTH)
    for rank in range(WORLD):
        for equal, peak, in_use in torch.load(tmp_path / f"{rank}.pt"):
            assert equal
            assert peak == activations
            assert in_use == 0
