"""`Decoder`: a pre-norm language model in the style of Qwen3-MoE and DeepSeek-V3."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pagestash.models.attention import RMSNorm, Rotation, make_attention, rotation
from pagestash.models.config import SIMULATED, DecoderConfig
from pagestash.moe.config import MoEConfig
from pagestash.moe.layer import MoE
from pagestash.moe.ops import cross_entropy
from pagestash.moe.parallel.dispatch import Dispatch
from pagestash.moe.parts import ExpertFC2, ExpertLinear
from pagestash.moe.router import Router
from pagestash.moe.shared import SharedExperts

MakeDispatch = Callable[[MoEConfig], Dispatch | None]


class DenseMLP(SharedExperts):
    """A gated MLP that keeps its input and first projection alone, as the experts do."""

    def __init__(self, config: DecoderConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        shape = replace(config.moe, expert_width=config.dense_width, shared_experts=1)
        super().__init__(shape, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return super().forward(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class Block(nn.Module):
    """One layer: `attn_norm`, `attn`, `mlp_norm`, and `mlp` or `moe`."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dense: bool,
        make_dispatch: MakeDispatch | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": dtype}
        self.attn_norm = RMSNorm(config.width, config.norm_eps, **made)
        self.attn = make_attention(config, **made)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, **made)
        self.mlp: DenseMLP | None = None
        self.moe: MoE | None = None
        if dense:
            self.mlp = DenseMLP(config, **made)
        else:
            dispatch = make_dispatch(config.moe) if make_dispatch else None
            self.moe = MoE(config.moe, dispatch=dispatch, **made)

    def forward(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's output, and its auxiliary loss where it has experts."""
        x = x + self.attn(self.attn_norm(x), by)
        normed, aux = self.mlp_norm(x), None
        if self.moe is not None:
            y, aux = self.moe(normed)
        else:
            assert self.mlp is not None
            y = self.mlp(normed)
        return x + y, aux


class Decoder(nn.Module):
    """A decoder of dense and MoE layers whose logits never exist whole.

        model = Decoder(preset("tiny"))
        loss, aux = model(tokens, labels)        # [B, S] integers both; train on loss + aux
        logits = model(tokens)                   # [B, S, vocab], for looking at

    `make_dispatch` gives each MoE layer its expert parallelism (None: all experts are here).

    With `part`, names of consecutive layers, it is one stage of a pipeline:

        first = Decoder(config, part=["embed", "layers.0"])
        last = Decoder(config, part=["layers.1", "head"])
        loss = last(first(tokens), labels)

    The stage with the embedding takes tokens, any other the result of the stage before; the stage with the head
    returns the loss. Auxiliary losses are not passed on: each stage adds the gradients of its own in backward. The
    names of parameters, and the values that `initialise` gives them, are those of the whole decoder, so checkpoints
    do not depend on stages.
    """

    embed: nn.Embedding | None
    layers: nn.ModuleList | nn.ModuleDict
    norm: RMSNorm | None
    head: nn.Linear | None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        part: Sequence[str] | None = None,
        make_dispatch: MakeDispatch | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name in SIMULATED:
            if getattr(config, name):
                raise ValueError(f"{name}={getattr(config, name)}: a Decoder has none; it is for simulations")
        made: Any = {"device": device, "dtype": dtype}
        self.config = config
        self.is_stage = part is not None
        numbers = range(config.layers) if part is None else _layer_numbers(part)
        first, last = part is None or "embed" in part, part is None or "head" in part
        self.embed = nn.Embedding(config.vocab, config.width, **made) if first else None
        blocks = {
            str(number): Block(
                config, dense=number < config.dense_layers, make_dispatch=make_dispatch, **made
            )
            for number in numbers
        }
        # Keyed by number, not by position: `layers.3` is `layers.3` on every stage.
        self.layers = nn.ModuleDict(blocks) if self.is_stage else nn.ModuleList(blocks.values())
        self.norm = RMSNorm(config.width, config.norm_eps, **made) if last else None
        self.head = nn.Linear(config.width, config.vocab, bias=False, **made) if last else None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """`tokens` [B, S]; in a stage without the embedding, the result of the stage before [B, S, D]."""
        config = self.config
        rotated = config.rope_dim if config.attention == "mla" else config.head_size
        by = rotation(tokens.shape[1], rotated, config.rope_theta, tokens.device)
        x = tokens if self.embed is None else self.embed(tokens)
        aux: torch.Tensor | None = None
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x, more = block(x, by)
            if more is not None:
                aux = more if aux is None else aux + more
        if self.norm is None or self.head is None:
            return x if aux is None else _AddGradientOf.apply(x, aux)
        x = self.norm(x)
        if labels is None:
            return self.head(x)
        weight, device = self.head.weight, x.device.type
        if torch.is_autocast_enabled(device):
            x, weight = (value.to(torch.get_autocast_dtype(device)) for value in (x, weight))
        with torch.autocast(device, enabled=False):
            loss = cross_entropy(x, weight, labels)
        if self.is_stage:
            return loss if aux is None else _AddGradientOf.apply(loss, aux)
        return loss, x.new_zeros((), dtype=torch.float32) if aux is None else aux

    @torch.no_grad()
    def initialise(self, seed: int, first_expert: int = 0) -> None:
        """Fill all parameters from `seed`.

        A parameter's values depend on its name, an expert's on its number too, and on nothing else: ranks that
        hold other experts, `first_expert` on, together have the weights of one process.
        """
        for prefix, module in self.named_modules():
            for short, value in module.named_parameters(recurse=False):
                name = f"{prefix}.{short}" if prefix else short
                if value.ndim == 1 or "bias" in short:
                    value.fill_(1.0 if short == "weight" else 0.0)
                    continue
                deviation = self._deviation(module, short, value)
                if isinstance(module, ExpertLinear):
                    for index, expert in enumerate(value):
                        _fill(expert, deviation, f"{seed}/{name}/{first_expert + index}")
                else:
                    _fill(value, deviation, f"{seed}/{name}")

    def _deviation(self, module: nn.Module, short: str, value: torch.Tensor) -> float:
        if module is self.embed or module is self.head:
            return 0.02
        into_residual = (
            isinstance(module, ExpertFC2)
            or (isinstance(module, SharedExperts) and short == "down")
            or (isinstance(module, nn.Linear) and value.shape[0] == self.config.width)
        )
        deviation = value.shape[-1] ** -0.5
        return deviation * (2 * self.config.layers) ** -0.5 if into_residual else deviation

    def routers(self) -> Iterator[Router]:
        """The routers of the MoE layers."""
        return (module for module in self.modules() if isinstance(module, Router))

    @torch.no_grad()
    def update_router_bias(self, rate: float, group: Any = None) -> None:
        """Move every selection bias towards an even load over the tokens of all ranks of `group`."""
        for router in self.routers():
            if router.correction is not None:
                if group is not None:
                    dist.all_reduce(router.load, group=group)
                router.update_bias(rate)


def _layer_numbers(part: Sequence[str]) -> Sequence[int]:
    """The numbers of the layers that a stage has; refused where they do not follow each other."""
    numbers = [int(name.removeprefix("layers.")) for name in part if name.startswith("layers.")]
    any_part = bool(numbers) or "embed" in part or "head" in part
    if not any_part or numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []):
        raise ValueError(f"layers {', '.join(part)}: expected a contiguous part of the decoder")
    return numbers


class _AddGradientOf(torch.autograd.Function):
    """`x` as it is; in backward also the gradient of a loss that `aux` was added to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        ctx.like = aux.shape, aux.dtype, aux.device
        # No view: a split backward detaches a stage's result in place, which views do not allow.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        return dx, torch.ones(shape, dtype=dtype, device=device)


def count_parameters(config: DecoderConfig) -> tuple[int, int]:
    """Parameters in all, and those that one token meets; nothing is allocated."""
    model = Decoder(config, device="meta")
    total = sum(value.numel() for value in model.parameters())
    routed = sum(
        value.numel()
        for module in model.modules()
        if isinstance(module, ExpertLinear)
        for value in module.parameters()
    )
    return total, total - routed + routed * config.top_k // config.experts


def _fill(value: torch.Tensor, deviation: float, name: str) -> None:
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator(value.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    value.normal_(0.0, deviation, generator=generator)
