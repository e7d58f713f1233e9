"""Modules of experts as transformers has them, in any layout. E experts, D the model's width, N an expert's."""

import torch
import transformers
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from pagestash.kernels.moe.activation import Activation
from support.activations import plain

E, D, N = 4, 32, 16


def config(name: str = "pagestash") -> transformers.PreTrainedConfig:
    made = transformers.Qwen3MoeConfig()
    made._experts_implementation = name
    return made


def experts_of(
    activation: Activation,
    *,
    transposed: bool = False,
    bias: bool = False,
    concatenated: bool = True,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A module of a class with the decorator of transformers, the same weights each time."""

    class Some(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.limit, self.alpha = E, activation.limit, activation.slope
            first = "gate_up_proj" if activation.gated else "up_proj"
            for name, rows, columns in ((first, activation.parts * N, D), ("down_proj", D, N)):
                shape = (E, columns, rows) if transposed else (E, rows, columns)
                setattr(self, name, nn.Parameter((torch.randn(shape) / 4).to(dtype)))
                if bias:
                    setattr(self, f"{name}_bias", nn.Parameter((torch.randn(E, rows) / 4).to(dtype)))

        def act_fn(self, h):
            return plain(h, activation)

        def _apply_gate(self, h):
            return plain(h, activation, interleaved=not concatenated)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the registry has another")

    torch.manual_seed(0)
    decorate = use_experts_implementation(
        is_transposed=transposed, has_bias=bias, is_concatenated=concatenated, has_gate=activation.gated
    )
    return decorate(Some)(config())
