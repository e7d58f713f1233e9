"""Recompute under FSDP: regions that are sharded units, hold some, or lie inside one; same bits."""

import os
from functools import partial

import torch
import torch.distributed as dist
from recomputed import Log
from support import same
from support.processes import start_ranks
from torch import nn

import pagestash as ps

WORLD, WIDTH = 2, 16
RULES = (["*"], ["0"], ["1.up"], ["*.norm", "2.down"], ["*.up", "*.norm"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.forwards = Log()

    def forward(self, x):
        self.forwards.append(None)
        return x.tanh() + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def _sharded(model: nn.Sequential, reshard: bool, mixed: bool) -> nn.Module:
    """By FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    narrow = torch.bfloat16 if mixed else None
    inside = MixedPrecisionPolicy(param_dtype=narrow)
    around = MixedPrecisionPolicy(param_dtype=narrow, output_dtype=torch.float32 if mixed else None)
    for block in model:
        fully_shard(block.up, reshard_after_forward=reshard, mp_policy=inside)  # a unit inside another
        fully_shard(block, reshard_after_forward=reshard, mp_policy=around)
    return fully_shard(model, reshard_after_forward=reshard, mp_policy=around)


def _sharded_by_fsdp1(model: nn.Sequential) -> nn.Module:
    """It makes plain attributes of its parameters in forward and backward."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )


def _train(rank: int, rules: list[str], shard):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    forwards = [block.forwards for block in blocks]
    model = shard(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = ps.Keeper(ps.Policy([ps.Rule(rule, "recompute") for rule in rules])).attach(model)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, WIDTH)
        with keeper.step():
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    left = sum(home.bytes for home in keeper.stats().homes.values())
    return losses + weights, [len(each) for each in forwards], left


def _rank(rank: int, path: str) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=WORLD)
    result = []
    ways = [
        partial(_sharded, reshard=reshard, mixed=mixed)
        for reshard, mixed in ((True, False), (False, False), (True, True))
    ]
    for shard in [*ways, _sharded_by_fsdp1]:
        plain, forwards, _ = _train(rank, [], shard)
        assert forwards == [3, 3, 3]
        for rules in RULES:
            kept, forwards, left = _train(rank, rules, shard)
            equal = same(plain, kept)
            result.append((rules, equal, forwards, left))
    torch.save(result, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_sharded_regions_are_run_again_to_the_same_bits(tmp_path):
    start_ranks(_rank, (str(tmp_path),), WORLD)
    for rank in range(WORLD):
        for rules, equal, forwards, left in torch.load(tmp_path / f"{rank}.pt"):
            assert equal, rules
            assert left == 0, rules
            expected = {"*": [6, 6, 6], "0": [6, 3, 3]}.get(rules[0], [3, 3, 3])
            assert forwards == expected, rules
