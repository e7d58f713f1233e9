"""A Qwen3-MoE slice in Megatron-Core, without Transformer Engine: its recomputation against ours.

Megatron's experts run one after another here (`SequentialMLP`); its grouped ones need Transformer Engine. Ours run
as one block under the same router and dispatcher. Milliseconds are those of a call of the schedule with two
microbatches; GiB are above weights and gradients.
"""

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import pagestash as ps
from benchmarks.harness import Claim, write
from benchmarks.hf_step import held_bytes, tidy, timed
from pagestash.integrations.megatron import in_steps, layer_spec

GIB = 2**30
SHAPE = {"layers": 4, "width": 2048, "heads": 32, "experts": 128, "top_k": 8, "expert_width": 768}
SMALL = {"layers": 2, "width": 64, "heads": 4, "experts": 8, "top_k": 2, "expert_width": 32}
SEQUENCE, ROWS, MICROBATCHES = 2048, 4, 2
STOCK, CORE, FULL = "Megatron's experts", "recompute core_attn", "recompute every layer"
OURS = "our experts"
WAYS: dict[str, tuple[bool, dict[str, Any], list[ps.Rule]]] = {
    STOCK: (False, {}, []),
    f"{STOCK}, {CORE}": (
        False,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        [],
    ),
    f"{STOCK}, {FULL}": (
        False,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        [],
    ),
    OURS: (True, {}, []),
    f"{OURS}, policy: core attention recomputed": (
        True,
        {},
        [ps.Rule("decoder.layers.*.self_attention.core_attention", "recompute")],
    ),
    f"{OURS}, policy: core attention recomputed, experts offloaded": (
        True,
        {},
        [
            ps.Rule("decoder.layers.*.self_attention.core_attention", "recompute"),
            ps.Rule("decoder.layers.*.mlp.experts", "offload"),
        ],
    ),
    f"{OURS}, policy: every layer recomputed": (True, {}, [ps.Rule("decoder.layers.*", "recompute")]),
}


def model_of(shape: dict[str, int], ours: bool, recompute: dict[str, Any]) -> GPTModel:
    dtype = torch.bfloat16
    config = TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["width"],
        num_attention_heads=shape["heads"],
        num_query_groups=4,
        kv_channels=shape["width"] // shape["heads"] * 2,
        ffn_hidden_size=3 * shape["width"],
        moe_ffn_hidden_size=shape["expert_width"],
        num_moe_experts=shape["experts"],
        moe_router_topk=shape["top_k"],
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.001,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bf16=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **recompute,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=shape["experts"], moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    return GPTModel(
        config,
        layer_spec(spec) if ours else spec,
        vocab_size=8192,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )


def measure(shape: dict[str, int], way: str, device: torch.device, repeats: int) -> dict[str, Any]:
    ours, recompute, rules = WAYS[way]
    model = model_of(shape, ours, recompute).to(device)
    keeper = ps.Keeper(ps.Policy(rules)).attach(model) if ours else None
    schedule = get_forward_backward_func()
    if keeper is not None:
        schedule = in_steps(schedule, keeper)
    tokens = torch.randint(8192, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(1)).to(device)
    places = torch.arange(SEQUENCE, device=device).expand(ROWS, SEQUENCE)
    later = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)

    def forward_step(_: Any, model: GPTModel) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        out = model(tokens[:, :-1].contiguous(), places, later, labels=tokens[:, 1:].contiguous())
        return out, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    def step() -> float:
        told = schedule(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
        )
        return told[0]["loss"].item()

    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(timed(step, tokens, repeats=repeats))
    gib = (torch.cuda.max_memory_allocated() - held_bytes(model)) / GIB
    row = {"way": way, "ms": round(ms, 1), "gib": round(gib, 2), "loss": step()}
    if keeper is not None:
        keeper.detach()
    return row


def run(out: Path | None = None, quick: bool = False) -> Path:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    device, rows = torch.device("cuda"), []
    for way in WAYS:
        rows.append(measure(SMALL if quick else SHAPE, way, device, 2 if quick else 8))
        print("{way:<70}{ms:8.1f} ms{gib:7.2f} GiB  loss {loss:.5f}".format(**rows[-1]), flush=True)
        tidy(device)
    config = SHAPE | {"sequence": SEQUENCE, "rows": ROWS, "microbatches": MICROBATCHES}
    return write("megatron", config=config, rows=rows, claims=claims(rows), out=out)


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """The time of ours, recomputed in every layer, over Megatron's. (The bits are compared by tests.)"""
    found = {row["way"]: row for row in rows}
    ratio = found[f"{OURS}, policy: every layer recomputed"]["ms"] / found[f"{STOCK}, {FULL}"]["ms"]
    return [
        Claim(what="every layer recomputed, time over Megatron's", value=ratio, bar=1.0, better="at most")
    ]
