"""A small Qwen3-MoE of transformers on a GPU, its loss and gradients, and the losses of a few steps."""

from typing import Any

import torch
import transformers

import pagestash as ps

CUDA = torch.device("cuda")
VOCABULARY = 1024
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "use_cache": False,
}  # fmt: skip


def qwen(
    experts: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa", **changes: int
) -> torch.nn.Module:
    """The same weights each time."""
    config = transformers.Qwen3MoeConfig(**(SHAPE | changes))
    torch.manual_seed(0)
    with CUDA:
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=experts, attn_implementation=attention
        ).train()


def tokens(seed: int = 1, shape: tuple[int, int] = (2, 512)) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def run(model: Any, given: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients of what requires one, by name."""
    given = tokens() if given is None else given
    model.zero_grad()
    loss = model(input_ids=given, labels=given).loss
    loss.backward()
    return loss.detach(), {
        name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad
    }


def train(
    model: Any, *rules: ps.Rule, graph: bool, count: int = 6, shape: tuple[int, int] = (2, 512)
) -> tuple[torch.Tensor, ps.GraphedStep]:
    """The losses of `count` steps of AdamW under a policy of `rules`, and what ran them."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True, capturable=True)

    def train_step(given: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=given, labels=given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    keeper = ps.Keeper(ps.Policy(rules=list(rules))).attach(model)
    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer, graph=graph)
    losses = [step(tokens(seed, shape)).clone() for seed in range(count)]
    step.wait()
    return torch.stack(losses), step
