"""Launch flags of a layout: ours, Megatron-LM's and torchtitan's."""

from pagestash.policy import Policy
from pagestash.simulation.build import Run

_MEGATRON_OFFLOAD = {
    "moe.expert_fc1": "expert_fc1",
    "moe.moe_act": "moe_act",
    "attn.core_attn": "core_attn",
    "attn_norm": "attn_norm",
    "mlp_norm": "mlp_norm",
}
_MEGATRON_RECOMPUTE = {
    "attn_norm": "layernorm",
    "mlp_norm": "layernorm",
    "moe.moe_act": "moe_act",
    "attn.qkv_linear": "mla_up_proj",
}


def pagestash_flags(run: Run) -> list[str]:
    """Of `torchrun -m pagestash train`; each pipeline rank takes its own policy file."""
    layout = run.layout
    flags = [f"--pipeline {layout.pp}", f"--schedule {layout.schedule}", f"--expert {layout.ep}"]
    flags.append("--policy policy-rank<N>.toml")
    return flags


def megatron_flags(run: Run, policies: tuple[Policy, ...]) -> list[str]:
    """Of Megatron-LM's `pretrain_gpt.py`. Its homes are the same on all ranks: the union of what ranks have."""
    layout = run.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--context-parallel-size {layout.cp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--expert-model-parallel-size {layout.ep}",
        f"--micro-batch-size {run.microbatch}",
        f"--global-batch-size {run.global_batch}",
        f"--seq-length {run.sequence}",
    ]
    if layout.tp > 1:
        flags.append("--sequence-parallel")
    if layout.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.vpp}")
    if layout.zero:
        flags.append("--use-distributed-optimizer")
    homes = {(_region(rule.match), rule.home) for policy in policies for rule in policy.rules}
    moved = {
        _MEGATRON_OFFLOAD[name] for name, home in homes if home == "offload" and name in _MEGATRON_OFFLOAD
    }
    again = {
        _MEGATRON_RECOMPUTE[name]
        for name, home in homes
        if home == "recompute" and name in _MEGATRON_RECOMPUTE
    }
    if ("", "recompute") in homes:
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif again:
        flags.append(f"--recompute-granularity selective --recompute-modules {' '.join(sorted(again))}")
    if moved:
        flags.append(f"--fine-grained-activation-offloading --offload-modules {','.join(sorted(moved))}")
    return flags


def torchtitan_flags(run: Run, policies: tuple[Policy, ...]) -> list[str]:
    """Of torchtitan's `run_train.sh`. It has no homes but recompute."""
    layout = run.layout
    recomputes = any(rule.home == "recompute" for policy in policies for rule in policy.rules)
    flags = [
        f"--parallelism.tensor_parallel_degree {layout.tp}",
        f"--parallelism.context_parallel_degree {layout.cp}",
        f"--parallelism.pipeline_parallel_degree {layout.pp}",
        f"--parallelism.pipeline_parallel_schedule {layout.schedule}",
        f"--parallelism.pipeline_parallel_microbatch_size {run.microbatch}",
        f"--parallelism.expert_parallel_degree {layout.ep}",
        "--parallelism.data_parallel_shard_degree -1",
        f"--training.local_batch_size {run.microbatches * run.microbatch}",
        f"--training.global_batch_size {run.global_batch}",
        f"--training.seq_len {run.sequence}",
        f"--activation_checkpoint.mode {'selective' if recomputes else 'none'}",
    ]
    if layout.vpp > 1:
        each = -(-run.config.layers // layout.stages)
        flags.insert(4, f"--parallelism.pipeline_parallel_layers_per_stage {each}")
    return flags


def _region(match: str) -> str:
    """The region within a layer of a rule's pattern: `layers.{0-3}.moe.moe_act` is `moe.moe_act`."""
    return ".".join(match.split(".")[2:])
