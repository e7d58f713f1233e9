"""Which rank holds which layers and experts, and how everything else is sharded.

Ranks that hold the same layers are *peers*: all ranks without a pipeline, and with one each block of `size /
pipeline` consecutive ranks. Each peer has its own tokens. The experts of every layer are divided among
`expert_parallel` consecutive peers; groups of such peers are data parallel. FSDP2 shards an expert over the
ranks that hold the same experts, and all other parameters over the peers. With `shard=False` they are replicated
there instead, and their gradients averaged after backward.
"""

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pagestash.models.decoder import Block, Decoder
from pagestash.moe.config import MoEConfig
from pagestash.moe.layer import MoE
from pagestash.moe.parallel.allgather import AllGather
from pagestash.moe.parallel.alltoall import AllToAll
from pagestash.moe.parallel.dispatch import Dispatch
from pagestash.moe.parts import ExpertLinear
from pagestash.torch_internals import drop_groups, foreach_div_, foreach_mul_, foreach_norm
from pagestash.train.config import TrainConfig
from pagestash.train.folder import RunError, reason


@dataclass(frozen=True, slots=True)
class World:
    """This rank's position among all ranks, from torchrun's environment variables."""

    rank: int = 0
    size: int = 1
    local: int = 0
    expert_parallel: int = 1
    pipeline: int = 1

    @classmethod
    def from_environment(cls, config: TrainConfig, experts: int) -> "World":
        """Read and check the environment; makes no process group yet."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size % config.pipeline:
            raise ValueError(f"pipeline={config.pipeline} does not divide the {size} ranks there are")
        peers = size // config.pipeline
        ranks = config.expert_parallel or peers
        if peers % ranks:
            where = "there are" if config.pipeline == 1 else "of a stage"
            raise ValueError(f"expert_parallel={ranks} does not divide the {peers} ranks {where}")
        if experts % ranks:
            raise ValueError(f"{ranks} ranks do not divide experts={experts}; set expert_parallel")
        rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        return cls(rank, size, local, ranks, config.pipeline)

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def peers(self) -> int:
        """Ranks that hold the same layers."""
        return self.size // self.pipeline

    @property
    def peer(self) -> int:
        """This rank's index among its peers."""
        return self.rank % self.peers

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.peers

    @property
    def expert_rank(self) -> int:
        return self.rank % self.expert_parallel


class RunRanks:
    """The process groups of a run; in a single process there are none, and every method is a no-op.

    (Unless a process group of one rank is initialised, and `shard` is off: then it runs the collectives that
    several ranks would.)
    """

    def __init__(self, world: World, device: torch.device, *, shard: bool = True) -> None:
        self.world, self.device = world, device
        self.sharded = shard and world.peers > 1
        self.everyone: Any = None
        self.peers: Any = None
        self.experts: Any = None
        self.pipeline: Any = None
        self._mesh: Any = None
        self._expert_mesh: Any = None
        self._mine = False
        if world.size == 1 and (shard or not (dist.is_available() and dist.is_initialized())):
            return
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=10))
            self._mine = True
        names = ("pipeline", "data", "experts")
        ways = (world.pipeline, world.peers // world.expert_parallel, world.expert_parallel)
        self._mesh = init_device_mesh(
            device.type, (*ways[:1], world.peers), mesh_dim_names=("pipeline", "peers")
        )
        self._expert_mesh = init_device_mesh(device.type, ways, mesh_dim_names=names)
        self.everyone = dist.group.WORLD
        self.peers, self.pipeline = self._mesh.get_group("peers"), self._mesh.get_group("pipeline")
        self.experts = self._expert_mesh.get_group("experts")

    def close(self) -> None:
        if self._mine:
            dist.destroy_process_group()

    def end_threads(self) -> None:
        """After `close`: end the threads of groups that were made here. By then the run's model must be gone.

        A thread of gloo drops a collective's tensors some time after the collective is done. If Python has ended
        by then, it aborts the process. Freeing a group waits for its threads, but `destroy_process_group` frees
        no group that something still refers to: sharded parameters, in cycles, and meshes, which DTensor caches.
        """
        if not self._mine:
            return
        for mesh in (self._mesh, self._expert_mesh):
            drop_groups(mesh)
        self.everyone = self.peers = self.experts = self.pipeline = self._mesh = self._expert_mesh = None
        gc.collect()

    def shard(self, model: Decoder) -> None:
        """Shard the model, or one stage of it, over the ranks that hold it (FSDP2)."""
        world = self.world
        if not self.sharded:
            return
        from torch.distributed.fsdp import fully_shard

        # Under a pipeline weights stay gathered between the passes of a step. Otherwise a stage's next forward
        # would reshard them under a split backward, which then silently skips gradients.
        again: Any = {"reshard_after_forward": False} if world.pipeline > 1 else {}
        apart = set(self._apart(model))
        if apart and world.peers > world.expert_parallel:
            for moe in model.modules():
                if isinstance(moe, MoE):
                    # One unit: `experts` runs, and reads the parameters of the two projections.
                    unit: Any = [moe.experts, moe.expert_fc1, moe.expert_fc2]
                    fully_shard(unit, mesh=self._expert_mesh["data"], **again)
            apart = set()
        for block in (module for module in model.modules() if isinstance(module, Block)):
            fully_shard(block, mesh=self._mesh["peers"], ignored_params=apart, **again)
        fully_shard(model, mesh=self._mesh["peers"], ignored_params=apart, **again)

    @torch.no_grad()
    def average(self, model: Decoder) -> None:
        """Make the gradients those of the ranks' mean loss, as far as FSDP has not done it.

        An expert's rows come from all ranks of its group, so its gradient is the sum over their losses.
        """
        apart = self._apart(model)
        experts = _gradients(apart)
        if self.everyone is not None and not self.sharded:
            self._mean_over(self.peers, _gradients(p for p in model.parameters() if p not in apart))
            self._mean_over(self._expert_mesh.get_group("data"), experts)
        if experts:
            foreach_div_(experts, self.world.expert_parallel)

    def _mean_over(self, group: Any, gradients: list[torch.Tensor]) -> None:
        """In place. Every rank of the group has gradients of the same parameters, in the same order."""
        if dist.get_world_size(group) == 1 < self.world.size:
            return
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        if gradients:
            foreach_div_(gradients, dist.get_world_size(group))

    def copies(self, model: Decoder) -> dict[nn.Parameter, int]:
        """How many ranks have the same part of each parameter."""
        if self.everyone is None or self.sharded:
            return dict.fromkeys(model.parameters(), 1)
        apart, groups = self._apart(model), self.world.peers // self.world.expert_parallel
        return {p: groups if p in apart else self.world.peers for p in model.parameters()}

    def _apart(self, model: Decoder) -> dict[nn.Parameter, None]:
        """The parameters of routed experts, in order, if ranks have different ones; a stage may have none."""
        return dict.fromkeys(expert_parameters(model)) if self.world.expert_parallel > 1 else {}

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.everyone is not None:
            dist.all_reduce(value, group=self.everyone)
        return value

    def mean(self, value: torch.Tensor | None) -> torch.Tensor:
        """The mean of the last stage's values over its peers, on all ranks; `value` is None on other stages."""
        if value is None:
            return self.sum(torch.zeros((), device=self.device)) / self.world.peers
        return self.sum(value.detach().clone()) / self.world.peers

    def any(self, here: bool) -> bool:
        """Whether `here` is true on any rank."""
        if self.everyone is None:
            return here
        return bool(self.sum(torch.tensor(float(here), device=self.device)))

    def agree(self, error: RunError | None) -> None:
        """Raise on all ranks if any has an error; every rank must call this."""
        if self.any(error is not None):
            raise error or RunError("another rank has ended the run")

    def lead(self, action: Callable[[], None]) -> None:
        """Run `action`, such as writing a file, on the first rank; if it fails, all ranks raise."""
        error = None
        if self.world.leads:
            try:
                action()
            except RunError as problem:
                error = problem
            except OSError as problem:
                error = RunError(f"{problem.filename or 'a file'}: {reason(problem)}")
        self.agree(error)

    # --- whole tensors, for checkpoints ---

    def whole(self, value: torch.Tensor, *, expert: bool) -> torch.Tensor:
        """The full tensor on the host; every rank must call this."""
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if expert and self.world.expert_parallel > 1 and value.ndim:
            parts = [torch.empty_like(value) for _ in range(self.world.expert_parallel)]
            dist.all_gather(parts, value.contiguous(), group=self.experts)
            value = torch.cat(parts)
        return value.cpu()

    def together(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole tensors of all stages, on the first rank; every rank must call this."""
        world = self.world
        if world.pipeline == 1 or world.peer:
            return tensors
        every: list[Any] | None = [None] * world.pipeline if world.leads else None
        dist.gather_object(tensors, every, dst=0, group=self.pipeline)
        return {name: value for stage in every or () for name, value in stage.items()}

    def part(self, whole: torch.Tensor, like: Any, *, expert: bool) -> torch.Tensor:
        """This rank's part of a full tensor, sharded like `like`."""
        if expert and self.world.expert_parallel > 1 and whole.ndim:
            whole = whole.chunk(self.world.expert_parallel)[self.world.expert_rank]
        whole = whole.to(self.device)
        if hasattr(like, "device_mesh") and whole.ndim:
            from torch.distributed.tensor import distribute_tensor

            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return whole


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of the routed experts."""
    return [p for module in model.modules() if isinstance(module, ExpertLinear) for p in module.parameters()]


def parameters_a_rank(model: nn.Module, world: World, *, shard: bool) -> int:
    """How many of a whole model's parameters one rank holds, on average over pipeline stages."""
    total = sum(p.numel() for p in model.parameters())
    if shard:
        return total // world.size
    experts = sum(p.numel() for p in expert_parameters(model))
    return (total - experts + experts // world.expert_parallel) // world.pipeline


def make_dispatch(config: MoEConfig, kind: str, group: Any, tokens: int) -> Dispatch:
    """The dispatch of one layer, for at most `tokens` tokens per rank and microbatch."""
    if kind == "all_to_all_exact":
        return AllToAll(config, group, padded=False)
    return (AllGather if kind == "all_gather" else AllToAll)(config, group, max_tokens=tokens)


@torch.no_grad()
def clip_gradients(copies: dict[nn.Parameter, int], most: float, ranks: RunRanks) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `most` (0: no clipping); returns the norm before.

    `copies` has every parameter, and how many ranks have the same part of it. The host does not wait. Ranks have
    different parts of the parameters, so the squares are summed over all ranks.
    """
    locals_ = [_local(p.grad) for p in copies if p.grad is not None]
    norms = torch.stack(foreach_norm(locals_)).float()
    if ranks.everyone is None:
        total = norms.norm()
    else:
        squares = norms.square()
        counts = [count for p, count in copies.items() if p.grad is not None]
        if any(count > 1 for count in counts):
            foreach_div_(list(squares.unbind()), [float(count) for count in counts])
        total = ranks.sum(squares.sum()).sqrt()
    if most:
        foreach_mul_(locals_, (most / (total + 1e-6)).clamp(max=1.0))
    return total


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's parts of the gradients that there are."""
    return [_local(p.grad) for p in parameters if p.grad is not None]


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
