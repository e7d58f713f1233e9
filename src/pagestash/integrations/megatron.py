"""Megatron-Core: our experts for a layer's spec, and a keeper's steps around its schedules.

    spec = layer_spec(get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True))
    model = GPTModel(config, spec, ...)
    keeper = ps.Keeper(policy).attach(model)
    forward_backward = in_steps(get_forward_backward_func(), keeper)

The router, the dispatcher and everything else stay Megatron's. Rows arrive sorted by expert, and their numbers on
the device: no expert waits for the host.

R rows that arrived, E experts of this rank, D width, N expert width.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from pagestash.keeper import Keeper
from pagestash.kernels.moe.activation import Activation
from pagestash.moe import ExpertFC1, ExpertFC2, Experts, MoEAct, MoEConfig, SortedRows
from pagestash.saved.recompute.once import once

Function = TypeVar("Function", bound=Callable[..., Any])
WEIGHTS = {"linear_fc1.weight": "expert_fc1", "linear_fc2.weight": "expert_fc2"}
"""What an expert of Megatron calls its weights, and which of our modules has those of all experts."""


class BlockExperts(SequentialMLP):
    """The experts of a rank as one block. State dicts, also sharded ones, are those of `SequentialMLP`.

    Weights have Megatron's initial values. `TEGroupedMLP` writes the same keys in sharded state dicts.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, **made: Any) -> None:
        activation = _activation_of(config)
        super().__init__(num_local_experts, config, submodules, **made)
        experts, self._modules["local_experts"] = self.local_experts, None
        up, down = (torch.stack([expert.get_parameter(name).data for expert in experts]) for name in WEIGHTS)
        E, D, N = down.shape
        self.expert_fc1 = ExpertFC1(E, N, D, gated=activation.gated, wired=True, device="meta")
        self.expert_fc2 = ExpertFC2(E, D, N, device="meta")
        self.moe_act = MoEAct()
        for part, weights, name in (
            (self.expert_fc1, up, "linear_fc1"),
            (self.expert_fc2, down, "linear_fc2"),
        ):
            part.weight = nn.Parameter(weights)
            # What Megatron notes of a parameter: whether ranks share it, and how it is split.
            part.weight.__dict__.update(experts[0].get_submodule(name).weight.__dict__)
        self.__dict__["of_megatron"] = experts  # not as a child: their weights are in ours
        for expert in experts:
            for name in WEIGHTS:
                _give(expert, name, None)
        settings = MoEConfig(width=D, expert_width=N, experts=E, top_k=1, activation=activation)
        parts = self.expert_fc1, self.moe_act, self.expert_fc2
        self.__dict__["runs"] = Experts(settings, parts, dispatch=SortedRows(settings), device=up.device)
        self.register_state_dict_post_hook(_one_by_one)
        self.register_load_state_dict_pre_hook(_together)

    runs: Experts
    of_megatron: nn.ModuleList

    def use_pool(self, *asked: Any) -> None:
        self.runs.use_pool(*asked)

    def use_recompute(self, on: bool) -> None:
        self.runs.use_recompute(on)

    def use_half(self, half: Any) -> None:
        self.runs.use_half(half)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        x_RD = permuted_local_hidden_states.contiguous()
        return self.runs(x_RD, permuted_probs.view(-1, 1), tokens_per_expert).to(x_RD.dtype), None

    def backward_dw(self) -> None:
        """Weight gradients are computed with the others."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        with self._as_megatrons():
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    @contextmanager
    def _as_megatrons(self) -> Any:
        """Inside, `local_experts` are Megatron's, and their weights are views of ours."""
        for name, part in WEIGHTS.items():
            views = self.get_submodule(part).weight.detach()
            for expert, view in zip(self.of_megatron, views, strict=True):
                _give(expert, name, nn.Parameter(view))
        self.local_experts = self.of_megatron
        try:
            yield
        finally:
            self._modules["local_experts"] = None
            for expert in self.of_megatron:
                for name in WEIGHTS:
                    _give(expert, name, None)


def _give(expert: nn.Module, name: str, weight: nn.Parameter | None) -> None:
    module, _, last = name.rpartition(".")
    expert.get_submodule(module).register_parameter(last, weight)


def _one_by_one(module: BlockExperts, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Write `local_experts.0.linear_fc1.weight` and so on, as `SequentialMLP` does."""
    for name, part in WEIGHTS.items():
        for number, weight in enumerate(state.pop(f"{prefix}{part}.weight")):
            key = f"{prefix}local_experts.{number}.{name}"
            state[key], state[_extra(key)] = weight, None


def _together(module: BlockExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, part in WEIGHTS.items():
        keys = [f"{prefix}local_experts.{number}.{name}" for number in range(module.num_local_experts)]
        if all(key in state for key in keys):
            state[f"{prefix}{part}.weight"] = torch.stack([state.pop(key) for key in keys])
            for key in keys:
                state.pop(_extra(key), None)


def _extra(key: str) -> str:
    """Beside each weight Megatron has a place for FP8's scales, which is None without them."""
    return key.removesuffix("weight") + "_extra_state"


def _activation_of(config: Any) -> Activation:
    """What experts of this config compute between their projections; a `ValueError` for what ours do not."""
    wrong = {
        "add_bias_linear=True": config.add_bias_linear,
        "moe_apply_probs_on_input=True": config.moe_apply_probs_on_input,
        "fp8": config.fp8,
        "fp4": config.fp4,
        "delay_wgrad_compute=True": config.delay_wgrad_compute,
        "expert_tensor_parallel_size > 1": config.expert_tensor_parallel_size not in (None, 1),
    }
    for setting, on in wrong.items():
        if on:
            raise ValueError(f"pagestash: our experts do not run with {setting}; leave Megatron's for that")
    gated, act = config.gated_linear_unit, config.activation_func
    limit = getattr(config, "activation_func_clamp_value", None)
    shift = getattr(config, "glu_linear_offset", 0.0) if gated else 0.0
    if gated and act is nn.functional.silu:
        return Activation(limit=limit, shift=shift)
    if gated and act is quick_gelu:
        return Activation(slope=1.702, limit=limit, shift=shift)
    raise ValueError(
        f"pagestash: our experts do not run with activation_func={getattr(act, '__name__', act)!r} and "
        f"gated_linear_unit={gated}; they do with silu and quick_gelu, gated"
    )


class OnceRouter(TopKRouter):
    """Megatron's router, which does not run again where its layer is recomputed.

    Its tokens go where they went, and its auxiliary loss is not logged twice.
    """

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return once(lambda: super(OnceRouter, self).forward(*args, **keywords))


Spec = TypeVar("Spec")


def layer_spec(spec: Spec) -> Spec:
    """A copy of the spec of a transformer layer, or of a block of them, with our experts.

    Its router runs once, also where its layer is recomputed. Layers without experts are left as they are. A
    `ValueError` if none has any.
    """
    made, found = _with_ours(spec)
    if not found:
        raise ValueError("pagestash: no layer of this spec has experts (an MoELayer)")
    return made


def _with_ours(spec: Any) -> tuple[Any, bool]:
    layers: Sequence[Any] | None = getattr(spec, "layer_specs", None)
    if layers is not None:  # TransformerBlockSubmodules
        pairs = [_with_ours(layer) for layer in layers]
        return replace(spec, layer_specs=[made for made, _ in pairs]), any(found for _, found in pairs)
    mlp = spec.submodules.mlp
    if isinstance(mlp, partial):  # newer versions than 0.16 have one, and take a ModuleSpec as well
        params = dict(mlp.keywords)
        mlp = ModuleSpec(mlp.func, submodules=params.pop("submodules", None), params=params)
    made_by = mlp.module if isinstance(mlp, ModuleSpec) else None
    if not (isinstance(made_by, type) and issubclass(made_by, MoELayer)):
        return spec, False
    # Not Transformer Engine's linear layers, which hold their weights in a form of their own.
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    moe = replace(
        mlp.submodules,
        experts=ModuleSpec(BlockExperts, submodules=linears),
        router=OnceRouter if mlp.submodules.router is TopKRouter else mlp.submodules.router,
    )
    layer = copy(spec)
    layer.submodules = replace(spec.submodules, mlp=replace(mlp, submodules=moe))
    return layer, True


def in_steps(forward_backward: Function, keeper: Keeper) -> Function:
    """`forward_backward`, as `get_forward_backward_func()` gives it, with each call a step of `keeper`.

    For all of its schedules: without pipelining, 1F1B and interleaved. A call with `forward_only=True` is no step.
    """

    @wraps(forward_backward)
    def run(*args: Any, **keywords: Any) -> Any:
        if keywords.get("forward_only", False):
            return forward_backward(*args, **keywords)
        with keeper.step():
            return forward_backward(*args, **keywords)

    return run  # type: ignore[return-value]
