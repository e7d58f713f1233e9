"""`ps.verify` of models that are sharded (FSDP2) or replicated (DDP): every rank tells of the same difference."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from support import same
from support.processes import start_ranks
from torch import nn

import pagestash as ps
from pagestash.verifying import runs

WORLD, WIDTH = 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.dropout(self.up(x), 0.1, True).relu())


class Clones(nn.Module):
    """Changes its argument, which recompute refuses."""

    def forward(self, x):
        return x.mul_(2.0).exp()


def _make(kind: str, last: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), last())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


class Faulty(ps.Keeper):
    """Under a rule for the second block, changes one bit of one weight on this rank."""

    @contextmanager
    def step(self, **kwargs):
        with super().step(**kwargs):
            yield
        if self.policy.rule_for("1") is not None:
            weight = next(parameter for parameter in self.parameters() if _local(parameter).ndim == 2)
            _local(weight).view(torch.int32)[0, 0] ^= 1


def _verify(
    kind: str, home: str, rank: int, last: type[nn.Module] = Block
) -> tuple[bool, str, tuple[str, ...]]:
    model = _make(kind, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [_local(parameter).clone() for parameter in model.parameters()]
    torch.manual_seed(rank)
    policy, batch = ps.Policy([ps.Rule("*", home, min_bytes=0)]), torch.randn(8, WIDTH)
    report = ps.verify(model, batch, policy, loss=torch.sum, optimizer=optimizer, backend="torch")
    assert same([_local(parameter) for parameter in model.parameters()], before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    if report.refused is None:
        model(batch).sum().backward()  # it can be trained on
        optimizer.step()
        assert not same([_local(parameter) for parameter in model.parameters()], before)
    return report.equal, str(report), report.regions


def _rank(rank: int, path: str) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=WORLD)
    found = {}
    for kind in ("ddp", "fsdp"):
        for home in ("stash", "recompute"):
            found[kind, home] = _verify(kind, home, rank)
        if rank == 1:
            runs.Keeper = Faulty
        found[kind, "faulty"] = _verify(kind, "stash", rank)
        runs.Keeper = ps.Keeper
        found[kind, "refused"] = _verify(kind, "recompute", rank, Clones)
    torch.save(found, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_agree_on_what_is_equal_on_what_one_of_them_has_changed_and_on_what_is_refused(tmp_path):
    start_ranks(_rank, (str(tmp_path),), WORLD)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD))
    for kind in ("ddp", "fsdp"):
        for home in ("stash", "recompute"):
            for rank in (first, second):
                assert rank[kind, home][0], rank[kind, home][1]
        for rank in (first, second):
            equal, text, regions = rank[kind, "faulty"]
            assert not equal
            assert "on rank 1" in text
            assert regions == ("1",)
            assert rank[kind, "refused"][1].startswith("refused: "), rank[kind, "refused"]
