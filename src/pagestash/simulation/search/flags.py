"""Launch flags of a layout: ours, Megatron-LM's and torchtitan's.

They say how a run is divided and where activations wait, and go beside the flags of the model. What a program
cannot do is left out, or said in a `ValueError`. `docs/simulate.md` names the versions they were checked against.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from pagestash.policy import Policy
from pagestash.simulation.costs.run import Run

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
_MEGATRON_PRECISION = {
    "bf16": ["--bf16"],
    "fp8": ["--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "fp32": [],
}
"""Its default recipe for 8 bits, delayed scaling, allows no recompute of norms or of experts' activation."""
_MEGATRON_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def pagestash_flags(run: Run, policy: str) -> list[str]:
    """Of `torchrun -m pagestash train`, whose ranks share one policy file: rules name layers of all ranks."""
    layout = run.layout
    if layout.tp > 1 or layout.cp > 1:
        raise ValueError("pagestash train has no tensor or context parallel ranks")
    flags = [f"--pipeline {layout.pp}"]
    if layout.pp > 1:
        flags.append(f"--schedule {layout.schedule}")
        if layout.vpp > 1:
            flags.append(f"--set chunks={layout.vpp}")
    return [
        *flags,
        f"--expert {layout.ep}",
        "--set dispatch=all_to_all_exact",
        f"--set sequence={run.sequence}",
        f"--set batch={run.microbatches * run.microbatch}",
        f"--set microbatches={run.microbatches}",
        f"--policy {policy}",
    ]


# --- Megatron-LM ---


def megatron_flags(run: Run, policies: Sequence[Policy]) -> list[str]:
    """Of Megatron-LM's `pretrain_gpt.py`. Its homes are the same on all ranks: the union of what ranks have."""
    layout = run.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--context-parallel-size {layout.cp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--expert-model-parallel-size {layout.ep}",
        "--expert-tensor-parallel-size 1",  # its default is that of tensor parallelism
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
        f"--micro-batch-size {run.microbatch}",
        f"--global-batch-size {run.global_batch}",
        f"--seq-length {run.sequence}",
        *_MEGATRON_PRECISION[run.precision],
    ]
    if layout.tp > 1:  # also needed by experts beside tensor parallelism
        flags.append("--sequence-parallel")
    if layout.pp > 1:
        flags.append(f"--pipeline-model-parallel-layout {_megatron_layout(run.placed)}")
    if layout.zero in _MEGATRON_SHARDED:
        flags.append(
            f"--use-megatron-fsdp --data-parallel-sharding-strategy {_MEGATRON_SHARDED[layout.zero]}"
        )
        flags.append("--ckpt-format fsdp_dtensor")
    if layout.zero:
        flags.append("--use-distributed-optimizer")
    return [*flags, *_megatron_homes(run, policies)]


def _megatron_layout(placed: Sequence[int]) -> str:
    """Layers of each stage, in quotes for the shell: E is the embedding, t a layer, L the loss.

    >>> _megatron_layout([2, 2, 2, 1])
    "'Ett|(tt|)*2tL'"
    """
    first, *inner, last = placed
    runs = ((size, len(list(own))) for size, own in groupby(inner))
    stages = "".join(f"({'t' * size}|)*{count}" if count > 1 else f"{'t' * size}|" for size, count in runs)
    return f"'E{'t' * first}|{stages}{'t' * last}L'"


def _megatron_homes(run: Run, policies: Sequence[Policy]) -> list[str]:
    homes = _homes(policies)
    if run.config.attention != "mla":
        homes.discard(("attn.qkv_linear", "recompute"))
    if ("", "recompute") in homes:
        # Layers that are recomputed whole save nothing inside that could be offloaded.
        most, every = _most_recomputed(run, policies), max(run.placed)
        if most < every:
            return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {most}"]
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    again = _named(_MEGATRON_RECOMPUTE, homes, "recompute")
    moved = _named(_MEGATRON_OFFLOAD, homes, "offload")
    flags = []
    if again:
        flags.append(f"--recompute-granularity selective --recompute-modules {' '.join(again)}")
    if moved:
        flags.append(f"--fine-grained-activation-offloading --offload-modules {' '.join(moved)}")
        part = _most_offloaded(run, policies)
        if part < 1:
            flags.append(f"--activation-offload-fraction {part:.2f}")
    return flags


def _named(known: dict[str, str], homes: set[tuple[str, str]], home: str) -> list[str]:
    return sorted({known[name] for name, own in homes if own == home and name in known})


def _most_recomputed(run: Run, policies: Sequence[Policy]) -> int:
    """Layers of a stage that are recomputed whole, at the most."""
    ends = accumulate(run.placed, initial=0)
    rules = [rule for policy in policies for rule in policy.rules if rule.home == "recompute"]
    whole = [any(rule.matches(f"layers.{number}") for rule in rules) for number in range(run.config.layers)]
    return max(sum(whole[first:last]) for first, last in pairwise(ends))


def _most_offloaded(run: Run, policies: Sequence[Policy]) -> float:
    """The part of a rank's layers that offload anything, at the most, rounded up to hundredths."""
    rules = [rule for policy in policies for rule in policy.rules if rule.home == "offload"]
    own, moved = [0] * run.layout.pp, [0] * run.layout.pp
    for stage, (first, last) in enumerate(pairwise(accumulate(run.placed, initial=0))):
        for layer in range(first, last):
            names = [f"layers.{layer}.{region}" for region in _MEGATRON_OFFLOAD]
            own[stage % run.layout.pp] += 1
            moved[stage % run.layout.pp] += any(rule.matches(name) for rule in rules for name in names)
    return max(math.ceil(100 * some / every) / 100 for some, every in zip(moved, own) if every)


# --- torchtitan ---


def torchtitan_flags(run: Run, policies: Sequence[Policy]) -> list[str]:
    """Of torchtitan's `run_train.sh`. It has no homes but recompute, and shards gradients from ZeRO 1 on."""
    layout, homes = run.layout, _homes(policies)
    flags = [
        f"--parallelism.tensor_parallel_degree {layout.tp}",
        f"--parallelism.context_parallel_degree {layout.cp}",
        f"--parallelism.pipeline_parallel_degree {layout.pp}",
        f"--parallelism.expert_parallel_degree {layout.ep}",
        "--parallelism.data_parallel_shard_degree -1",
        f"--parallelism.fsdp_reshard_after_forward {'always' if layout.zero == 3 else 'never'}",
        f"--training.num_tokens_per_microbatch_per_dp_rank {run.microbatch * run.sequence}",
        f"--training.num_tokens_per_train_step {run.global_batch * run.sequence}",
        f"--training.max_context_length {run.sequence}",
    ]
    if layout.pp > 1:
        flags += [
            f"--parallelism.pipeline_parallel_schedule {layout.schedule}",
            f"--parallelism.num_pp_microbatches {run.microbatches}",
            *_torchtitan_stages(run),
        ]
    if layout.pp > 1 or layout.ep > 1:
        flags.append("--training.disable_cuda_graphs")
    recomputes = any(home == "recompute" for _, home in homes)
    kind = "full" if ("", "recompute") in homes else "selective" if recomputes else "none"
    return [*flags, f"activation-checkpoint:{kind}"]  # a subcommand, which comes last


def _torchtitan_stages(run: Run) -> list[str]:
    """Its own division of layers that comes nearest to the run's.

    It counts the embedding as some layers and the head as some, and divides the sum evenly; stages at the front
    have one more. The number of stages follows from the layers of a stage.
    """
    stages, layers, placed = run.layout.stages, run.config.layers, run.placed
    best, found = math.inf, None
    for before in range(layers // stages + 2):
        for after in range(layers // stages + 2):
            each = -(-(layers + before + after) // stages)
            divided = torchtitan_division(stages, layers, before, after)
            if divided is None or -(-(layers + before + after) // each) != stages:
                continue
            far = sum(abs(one - other) for one, other in zip(divided, placed))
            if far < best:
                best, found = far, (each, before, after)
    if found is None:
        raise ValueError(
            f"torchtitan has no flag for {layers} layers on {stages} stages: set "
            "parallelism.module_fqns_per_model_part in its configuration"
        )
    each, before, after = found
    return [
        f"--parallelism.pipeline_parallel_layers_per_stage {each}",
        f"--parallelism.pipeline_parallel_first_stage_less_layers {before}",
        f"--parallelism.pipeline_parallel_last_stage_less_layers {after}",
    ]


def torchtitan_division(stages: int, layers: int, before: int, after: int) -> list[int] | None:
    """Layers of each stage with the embedding as `before` layers, the head as `after`; None where it refuses."""
    each, more = divmod(layers + before + after, stages)
    if max(before, after) > each or not each:
        return None
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= before
    sizes[-1] -= after
    return sizes


def _homes(policies: Sequence[Policy]) -> set[tuple[str, str]]:
    """Regions within a layer, "" for the layer, and their homes: of `layers.{0-3}.moe.moe_act`, `moe.moe_act`."""
    rules = (rule for policy in policies for rule in policy.rules)
    return {(".".join(rule.match.split(".")[2:]), rule.home) for rule in rules}
