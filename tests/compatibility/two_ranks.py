"""Training on two ranks, one function a feature, as in `one_rank.py`."""

from typing import Any

import torch
import torch.distributed as dist
from compatibility.one_rank import ROWS, WIDTH, Block, Net, Trained, batches, local, loop, policy_of, seeded
from support.compare import same
from torch import nn

import pagestash as ps
from pagestash.moe import AllToAll, MoE, MoEConfig


def ddp(home: str | None) -> Trained:
    model = nn.parallel.DistributedDataParallel(seeded())
    return loop(model, home, seed=dist.get_rank())


def fsdp1(home: str | None) -> Trained:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FSDP(
        seeded(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return loop(model, home, seed=dist.get_rank())


def fsdp2(home: str | None) -> Trained:
    from torch.distributed.fsdp import fully_shard

    model = seeded()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return loop(model, home, seed=dist.get_rank())


def tensor_parallel(home: str | None) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = seeded()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return loop(model, home)


def pipeline(home: str | None, schedule: str = "Schedule1F1B", stages: int = 1) -> Trained:
    from torch.distributed import pipelining

    rank, layers = dist.get_rank(), 2 * 2 * stages
    torch.manual_seed(0)
    whole = Net(layers)
    parts, made = [], []
    for index in range(stages):
        number = rank + 2 * index
        part = Net(0)
        part.layers = nn.ModuleDict({str(n): whole.layers[n] for n in (2 * number, 2 * number + 1)})
        part.forward = lambda x, part=part: nn.Sequential(*part.layers.values())(x)
        parts.append(part)
        made.append(pipelining.PipelineStage(part, number, 2 * stages, torch.device("cpu")))
    kind = getattr(pipelining, schedule)
    runs = kind(made if stages > 1 else made[0], 4, loss_fn=lambda y, target: (y - target).square().mean())
    keeper = ps.Keeper(policy_of(home))
    for part in parts:
        keeper.attach(part, others=[f"layers.{n}" for n in range(layers)])
    keeper.follow(runs)
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.1)
    losses: list[torch.Tensor] = []
    for x in batches():
        with keeper.step():
            first = (x,) if rank == 0 else ()
            last = rank == (2 * stages - 1) % 2
            runs.step(
                *first, target=torch.zeros(ROWS, WIDTH) if last else None, losses=losses if last else None
            )
        optimizer.step()
        optimizer.zero_grad()
    return (losses, [local(each) for part in parts for each in part.parameters()]), keeper


def interleaved(home: str | None) -> Trained:
    return pipeline(home, "ScheduleInterleaved1F1B", stages=2)


def zero_bubble(home: str | None) -> Trained:
    return pipeline(home, "ScheduleInterleavedZeroBubble", stages=2)


class Experts(nn.Module):
    def __init__(self, padded: bool) -> None:
        super().__init__()
        config = MoEConfig(width=WIDTH, expert_width=16, experts=4, top_k=2)
        self.layers = nn.ModuleList(
            MoE(config, dispatch=AllToAll(config, padded=padded, max_tokens=ROWS if padded else None))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y, _ = layer(x)
            x = x + y
        return x


def experts(home: str | None, *, padded: bool = True) -> Trained:
    torch.manual_seed(dist.get_rank())
    model = Experts(padded)
    for layer in model.layers:
        dist.broadcast(layer.router.weight.data, src=0)
    # (Experts that recompute by themselves save nothing, which no figure of a keeper shows; a layer's are counted.)
    match = "layers.*" if home == "recompute" else "layers.*.experts"
    return loop(model, home, match=match, seed=dist.get_rank())


def exact_experts(home: str | None) -> Trained:
    return experts(home, padded=False)


def work(rank: int, folder: str, features: dict[str, tuple[str, ...]]) -> None:
    """Each feature without a home and under each: whether all is the same, bytes that moved, or what was said."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[tuple[str, str], Any] = {}
    for name, homes in features.items():
        feature = globals()[name]
        plain, _ = feature(None)
        for home in homes:
            try:
                kept, keeper = feature(home)
                found[name, home] = same(kept, plain), keeper.stats().homes[home].peak
            except (ValueError, RuntimeError) as error:
                found[name, home] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
