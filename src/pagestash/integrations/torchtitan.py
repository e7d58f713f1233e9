"""torchtitan: our experts, and a policy in the place of activation checkpointing, by `--override.imports`.

    --override.imports pagestash.integrations.torchtitan.experts \\
        'pagestash.integrations.torchtitan.policy={"path": "policy.toml"}'

`experts` replaces `RoutedExperts`: dispatch, experts and combine become one autograd node, which saves the tokens
and the first projection. Its parameters are torchtitan's own (`FusedGroupedExperts`, `GptOssGroupedExperts`), with
their initialisation, sharding and checkpoint layout. `policy` opens a keeper's step around forward and backward.

B batch, L sequence, D width, K choices of a token.
"""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from pagestash.keeper import Keeper
from pagestash.kernels.moe.activation import Activation
from pagestash.moe import AllToAll, Experts, MoEAct, MoEConfig
from pagestash.moe.parts import ROWS_OF_OTHERS
from pagestash.moe.projection import Weight
from pagestash.policy import Policy
from pagestash.saved.names import named_modules

# --- experts ---


class Act(MoEAct, Module):
    """`moe_act`: the first projection, for rules."""


class Projection(MoEAct, Module):
    """`expert_fc1` or `expert_fc2`: calling it gives what the block multiplies with, which its owner holds."""

    def __init__(self, owner: "BlockExperts", weight: str, bias: str = "") -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, where it is no child
        self._weight, self._bias = weight, bias

    def use_recompute(self, on: bool) -> None:
        """Nothing more than is done anyway; refused where the rows came from other ranks."""
        if on and self is self._owner[0].expert_fc1 and self._owner[0].runs.dispatch is not None:
            raise ValueError(ROWS_OF_OTHERS)
        super().use_recompute(on)

    def forward(self) -> Weight:
        weight = _local(getattr(self._owner[0], self._weight))
        # w13 is [E, F, 2, D], gate and linear part in turn; the others have three dimensions anyway.
        weight = weight.reshape(weight.shape[0], -1, weight.shape[-1])
        return Weight(weight, _local(getattr(self._owner[0], self._bias)) if self._bias else None)


class BlockExperts(Module):
    """Grouped experts of torchtitan that run, with their dispatch, as one block."""

    expert_fc1: Projection

    def make_block(
        self, config: Any, weights: tuple[str, str], biases: tuple[str, str], act: Activation
    ) -> None:
        """Once the parameters are there."""
        self.expert_fc1, self.expert_fc2 = (
            Projection(self, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )
        self.moe_act = Act()
        settings = MoEConfig(
            width=config.dim,
            expert_width=config.hidden_dim,
            experts=config.num_experts,
            top_k=config.top_k,
            activation=act,
            bias=bool(biases[0]),
        )
        parts: Any = (self.expert_fc1, self.moe_act, self.expert_fc2)
        # Not as a child: torchtitan wants modules of its own protocol.
        self.__dict__["runs"] = Experts(settings, parts, interleaved=True)

    runs: Experts

    def use_pool(self, *asked: Any) -> None:
        self.runs.use_pool(*asked)

    def use_recompute(self, on: bool) -> None:
        self.runs.use_recompute(on)

    def use_half(self, half: Any) -> None:
        self.runs.use_half(half)

    def send_over(self, group: dist.ProcessGroup) -> None:
        """From here on the experts are those of one rank of `group`."""
        self.runs.dispatch = AllToAll(self.runs.config, group, padded=False)

    def forward(self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        # In bf16, as torchtitan's own experts.
        return self.runs(x_TD.bfloat16(), scores_TK.float(), ids_TK).type_as(x_TD)


class BlockSwiGLU(BlockExperts, FusedGroupedExperts):
    """With the weights of `FusedGroupedExperts`, which are stock's in a checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        top_k: int

    def __init__(self, config: Config) -> None:
        FusedGroupedExperts.__init__(self, config)
        self.make_block(config, ("w13", "w2_EDF"), ("", ""), Activation())


class BlockGptOss(BlockExperts, GptOssGroupedExperts):
    """With the weights and biases of `GptOssGroupedExperts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        top_k: int

    def __init__(self, config: Config) -> None:
        GptOssGroupedExperts.__init__(self, config)
        weights, biases = ("mlp1_weight_EGD", "mlp2_weight_EDF"), ("mlp1_bias_EG", "mlp2_bias_ED")
        act = Activation(slope=1.702, limit=config.swiglu_limit, shift=1.0)
        self.make_block(config, weights, biases, act)


class BlockRoutedExperts(RoutedExperts):
    """Routed experts whose dispatch is a part of the block."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and mesh.size() > 1:
            self.inner_experts.send_over(mesh.get_group())

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        x_TD, scores_TK, ids_TK = (
            each.flatten(0, 1) for each in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK)
        )
        return self.inner_experts(x_TD, scores_TK, ids_TK).view(x_BLD.shape)


@override(target=RoutedExperts.Config, description="pagestash: dispatch and experts as one node")
def experts(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    """Run the routed experts by our block."""
    inner, dispatcher = cfg.inner_experts, cfg.token_dispatcher
    if type(dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ValueError(
            "pagestash: the block sends rows itself, in the place of the standard dispatcher, and here is "
            f"{type(dispatcher).__qualname__}; use a config with comm_backend 'standard', or a policy alone"
        )
    kind: Any
    if type(inner) is GroupedExperts.Config:
        inner, kind = fused_grouped_experts(inner), BlockSwiGLU
    elif type(inner) is GptOssGroupedExperts.Config:
        kind = BlockGptOss
    else:
        raise ValueError(
            f"pagestash: {type(inner).__qualname__} computes something of its own; only GroupedExperts and "
            "GptOssGroupedExperts of torchtitan can be replaced"
        )
    inner = derive(inner, kind.Config, top_k=dispatcher.top_k)
    return derive(cfg, BlockRoutedExperts.Config, inner_experts=inner)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# --- policy ---


class Homes(ActivationCheckpointing):
    """A policy instead of activation checkpointing. It takes effect in the first step, when all is sharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        path: str = ""
        budget: str = ""

    def apply(self, model: torch.nn.Module) -> None:
        """Nothing is checkpointed."""


@override(target=ActivationCheckpointing.Config, description="pagestash: a policy instead of checkpointing")
def policy(cfg: ActivationCheckpointing.Config, path: str = "", budget: str = "") -> Homes.Config:
    """Give what is saved the homes of the policy in `path`, or those that are planned for `budget`."""
    if bool(path) == bool(budget):
        raise ValueError(
            'pagestash: the policy needs {"path": "policy.toml"} or {"budget": "70GiB"}, one of them'
        )
    _unattached(path, budget)  # what is wrong with either is said here, before a model is made
    return derive(cfg, Homes.Config, path=path, budget=budget)


def _unattached(path: str, budget: str) -> Keeper:
    return Keeper(Policy.load(path)) if path else Keeper(budget=budget)


def keeper_of(trainer: Trainer) -> Keeper | None:
    """The keeper of `trainer`'s model parts, made and attached at the first call; None without a policy."""
    if not hasattr(trainer, "keeper"):
        trainer.keeper = _make_keeper(trainer)
    return trainer.keeper


def _make_keeper(trainer: Any) -> Keeper | None:
    chosen = trainer.config.activation_checkpoint
    if not isinstance(chosen, Homes.Config):
        asked = (each if isinstance(each, str) else each[0] for each in trainer.config.override.imports)
        if f"{__name__}.policy" in asked:
            raise ValueError(
                "pagestash: the policy takes the place of activation checkpointing, which is off in this config; "
                "add `activation-checkpoint:selective` to the command"
            )
        return None
    if not trainer.config.training.disable_cuda_graphs:
        raise ValueError(
            "pagestash: a policy moves tensors while the host looks, and torchtitan would capture the step; add "
            "--training.disable_cuda_graphs"
        )
    keeper = _unattached(chosen.path, chosen.budget)
    names = sorted({name for part in trainer.model_parts for name in named_modules(part)})
    pipelined = trainer.parallel_dims.pp_enabled
    if pipelined:  # a rule may name layers of other ranks alone
        mesh = trainer.parallel_dims.get_mesh("pp")
        of_ranks: list[Any] = [None] * mesh.size()
        dist.all_gather_object(of_ranks, names, group=mesh.get_group())
        names = [name for each in of_ranks for name in each]
    for part in trainer.model_parts:
        keeper.attach(part, others=names if pipelined else ())
    if pipelined:
        keeper.follow(trainer.pp_schedule)
    return keeper


def _in_steps(name: str) -> None:
    """Let `Trainer`'s method of that name run in a step of its keeper: torchtitan has no door there."""
    inner = getattr(Trainer, name)

    @wraps(inner)
    def outer(self: Any, *args: Any, **keywords: Any) -> Any:
        keeper = keeper_of(self)
        if keeper is None:
            return inner(self, *args, **keywords)
        with keeper.step():
            loss = inner(self, *args, **keywords)
        if self.step == 2:  # what steps after the measured one move
            homes = keeper.stats().homes.items()
            moved = ", ".join(f"{home} {held.peak:,} bytes" for home, held in homes if home != "keep")
            logger.info(f"pagestash: at the peak {moved}")
        return loss

    setattr(Trainer, name, outer)


for _name in ("_forward_backward_body", "pp_forward_backward_step"):
    _in_steps(_name)
