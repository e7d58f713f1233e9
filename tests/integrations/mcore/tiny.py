"""A GPTModel of megatron-core with experts, trained on a CPU. What it assumes of a GPU is replaced, here alone.

`docs/megatron.md` lists the replacements.
"""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist

import pagestash as ps
from pagestash.integrations.megatron import in_steps, layer_spec

LAYERS, VOCAB, LENGTH = 4, 128, 32


def on_cpu():
    """Replace what Megatron assumes of a GPU, for good: in a process of its own."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.set_device = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    stream = SimpleNamespace(
        wait_stream=lambda _: None, record_event=lambda: stream, synchronize=lambda: None
    )
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    token_dispatcher.maybe_move_tensor_to_cpu = (  # theirs looks at tensors of a GPU alone
        lambda tensor, as_numpy=False, **_: tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )

    class Torch:
        """torch, which makes its tensors on the CPU."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def zeros(self, *shape, **made):
            return torch.zeros(*shape, **{**made, "device": "cpu"})

    schedules.torch = moe_utils.torch = Torch()
    if not hasattr(moe_utils, "te_general_gemm"):  # a NameError in the router where Transformer Engine is not
        moe_utils.te_general_gemm = None
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    random._get_all_rng_states = lambda: (torch.get_rng_state(), None, None)  # for its own recomputation
    random._set_all_rng_states = lambda state, *_: torch.set_rng_state(state)


def model_of(*, ours=True, pp=1, stages=1, dtype=torch.float32, **settings):
    """This rank's parts of the model, as many as it has stages."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = {
        "num_layers": LAYERS,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 48,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": stages if stages > 1 else None,
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "deallocate_pipeline_outputs": pp > 1,
    }
    config = TransformerConfig(**{**made, **settings})
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    if ours:
        spec = layer_spec(spec)
    torch.manual_seed(0)
    parts = []
    for stage in range(stages):
        place = {"ignore_virtual": False, "vp_stage": stage} if stages > 1 else {}
        parts.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCAB,
                max_sequence_length=64,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                pre_process=mpu.is_pipeline_first_stage(**place),
                post_process=mpu.is_pipeline_last_stage(**place),
                vp_stage=stage if stages > 1 else None,
            )
        )
    return parts


def attach(policy, parts, pp=1):
    keeper = ps.Keeper(policy)
    names = [
        "decoder.layers",
        *(f"decoder.layers.{n}.{m}" for n in range(LAYERS) for m in ("mlp.experts", "x")),
    ]
    for part in parts:
        keeper.attach(part, others=names if pp > 1 else ())
    return keeper


def train(policy=None, *, steps=3, microbatches=4, parts=None, pp=1, stages=1, forward_only=False, **made):
    """Losses and norms of gradients by step, the keeper and this rank's parts."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parts = model_of(pp=pp, stages=stages, **made) if parts is None else parts
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    run, keeper = get_forward_backward_func(), None
    if policy is not None:
        keeper = attach(policy, parts, pp)
        run = in_steps(run, keeper)
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator) for _ in range(microbatches)]
        found = run(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in parts] if stages > 1 else iter(batches),
            model=parts if stages > 1 else parts[0],
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=forward_only,
        )
        norm = torch.nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(([each["loss"] for each in found], norm))
    return seen, keeper, parts


def forward_step(batches, model):
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    out = model(tokens, torch.arange(LENGTH).expand(2, LENGTH), mask, labels=labels)

    def loss(output):
        return output.float().mean(), {"loss": output.detach().float().mean()}

    return out, loss


def begin(rank, ranks, place, **parallel):
    """Process groups of this rank; `place` is a file that does not exist yet."""
    from megatron.core import parallel_state as mpu

    torch.set_num_threads(1)
    on_cpu()
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)
    mpu.initialize_model_parallel(**parallel)
