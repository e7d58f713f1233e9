"""Train a small GPT with experts in Megatron-Core, with our experts and under a policy.

    torchrun --nproc-per-node 1 examples/megatron_train.py                      # on a GPU; Megatron needs one
    torchrun --nproc-per-node 2 examples/megatron_train.py --expert-parallel 2

Trains twice from the same weights, with everything kept and under the policy, and compares losses and bytes.
"""

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

import pagestash as ps
from pagestash.integrations.megatron import in_steps, layer_spec

RULES = [
    ps.Rule("decoder.layers.*.mlp.experts", "stash", min_bytes=0),
    ps.Rule("decoder.layers.*.self_attention", "recompute"),
]


def model_of(layers: int, width: int, experts: int, ranks: int) -> nn.Module:
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        ffn_hidden_size=2 * width,
        moe_ffn_hidden_size=width,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=ranks,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
    torch.manual_seed(0)
    return GPTModel(
        config, layer_spec(spec), vocab_size=256, max_sequence_length=1024, position_embedding_type="rope"
    )


def train(
    rules: list[ps.Rule], device: torch.device, *, steps: int, sequence: int, **shape: int
) -> tuple[list[float], ps.Keeper]:
    model = model_of(**shape).to(device)
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page="4KiB"))).attach(model)
    forward_backward = in_steps(get_forward_backward_func(), keeper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(sequence, device=device).expand(2, sequence)
    later = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device).triu(1)

    def forward_step(batches, model):
        tokens = next(batches).to(device)
        out = model(tokens[:, :-1].contiguous(), places, later, labels=tokens[:, 1:].contiguous())
        return out, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    losses = []
    for _ in range(steps):
        batches = [torch.randint(0, 256, (2, sequence + 1), generator=generator) for _ in range(4)]
        told = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=4,
            seq_length=sequence,
            micro_batch_size=2,
        )
        optimizer.step()
        optimizer.zero_grad()
        losses += [each["loss"].item() for each in told]
    return losses, keeper


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-parallel", type=int, default=1, dest="ranks")
    shape = vars(parser.parse_args(arguments))
    if not dist.is_initialized():
        dist.init_process_group()
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        parallel_state.initialize_model_parallel(expert_model_parallel_size=shape["ranks"])
        model_parallel_cuda_manual_seed(0)
    device = torch.device(torch.cuda.current_device())
    (plain, _), (kept, keeper) = train([], device, **shape), train(RULES, device, **shape)
    print("losses:", *(f"{loss:.4f}" for loss in kept))
    print(f"losses equal to those without a policy: {plain == kept}")
    for home, held in keeper.stats().homes.items():
        print(f"{home}: {held.peak:,} bytes at the peak")


if __name__ == "__main__":
    main()
