"""`DecoderStage`: a contiguous part of a `Decoder`, under the same parameter names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pagestash.models.attention import RMSNorm, rotation
from pagestash.models.config import DecoderConfig
from pagestash.models.decoder import Block, Decoder, MakeDispatch
from pagestash.moe.ops import cross_entropy


class DecoderStage(Decoder):
    """The layers `names` (`embed`, `layers.3`, `head`) of a decoder, for one stage of a pipeline.

        first = DecoderStage(config, ["embed", "layers.0"])
        last = DecoderStage(config, ["layers.1", "head"])
        loss = last(first(tokens), labels)

    It takes tokens where it has the embedding and the stage before's result elsewhere, and gives the loss where it
    has the head. Auxiliary losses are not handed on: each stage adds the gradients of its own in backward. Names of
    parameters, and the values that `initialise` gives them, are those of the whole decoder: a checkpoint knows
    nothing of stages.
    """

    def __init__(
        self,
        config: DecoderConfig,
        names: Sequence[str],
        *,
        make_dispatch: MakeDispatch | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        made: Any = {"device": device, "dtype": dtype}
        self.config = config
        numbers = [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]
        whole = "embed" in names or "head" in names or bool(numbers)
        if not whole or numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []):
            raise ValueError(f"layers {', '.join(names)}: expected a contiguous part of the decoder")
        own: Any = self  # what the whole decoder always has may be missing here
        own.embed = nn.Embedding(config.vocab, config.width, **made) if "embed" in names else None
        # Keyed by number, not by place: `layers.3` is `layers.3` on every stage.
        own.layers = nn.ModuleDict(
            {
                str(number): Block(
                    config, dense=number < config.dense_layers, make_dispatch=make_dispatch, **made
                )
                for number in numbers
            }
        )
        last = "head" in names
        own.norm = RMSNorm(config.width, config.norm_eps, **made) if last else None
        own.head = nn.Linear(config.width, config.vocab, bias=False, **made) if last else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        config = self.config
        own: Any = self
        turned = config.rope_dim if config.attention == "mla" else config.head_size
        by = rotation(x.shape[1], turned, config.rope_theta, x.device)
        embed, layers, norm, head = own.embed, own.layers, own.norm, own.head
        if embed is not None:
            x = embed(x)
        aux = None
        for layer in layers.values():
            x, more = layer(x, by)
            if more is not None:
                aux = more if aux is None else aux + more
        if norm is None or head is None:
            return x if aux is None else _AlsoLose.apply(x, aux)
        x = norm(x)
        if labels is None:
            return head(x)
        weight, device = head.weight, x.device.type
        if torch.is_autocast_enabled(device):
            x, weight = (part.to(torch.get_autocast_dtype(device)) for part in (x, weight))
        with torch.autocast(device, enabled=False):
            loss = cross_entropy(x, weight, labels)
        return loss if aux is None else _AlsoLose.apply(loss, aux)


class _AlsoLose(torch.autograd.Function):
    """`x` as it is; in backward also the gradient of a loss that `aux` was added to."""

    @staticmethod
    def forward(ctx, x, aux):
        ctx.like = aux.shape, aux.dtype, aux.device
        # No view: a split backward detaches a stage's result in place, which views do not allow.
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        shape, dtype, device = ctx.like
        return dx, torch.ones(shape, dtype=dtype, device=device)
