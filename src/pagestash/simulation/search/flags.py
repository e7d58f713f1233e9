"""Launch flags of a planned run: ours, Megatron-LM's and torchtitan's.

They say how a run is divided and where activations wait, and go beside the flags of the model. What a program
cannot do is left out, or said in a `ValueError`. `docs/simulate.md` names the versions they were checked against.
"""

from collections.abc import Sequence
from itertools import groupby

from pagestash.simulation.cluster.layout import place_as_torchtitan
from pagestash.simulation.model.homes import Homes, MegatronHomes
from pagestash.simulation.model.run import Run

_MEGATRON_PRECISION = {
    "bf16": ["--bf16"],
    "fp8": ["--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "fp32": [],
}
"""Its default recipe for 8 bits, delayed scaling, allows no recompute of norms or of experts' activation."""
_MEGATRON_DISPATCHER = {
    "alltoall": ["--moe-token-dispatcher-type alltoall"],
    "flex": ["--moe-token-dispatcher-type flex --moe-enable-deepep"],
}
_MEGATRON_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def pagestash_flags(run: Run, policy: str) -> list[str]:
    """Of `torchrun -m pagestash train`, whose ranks share one policy file: rules name layers of all ranks."""
    layout = run.layout
    if layout.tp > 1 or layout.cp > 1:
        raise ValueError("pagestash train has no tensor or context parallel ranks")
    flags = [f"--pp {layout.pp}"]
    if layout.pp > 1:
        flags.append(f"--schedule {layout.schedule}")
        if layout.vpp > 1:
            flags.append(f"--set chunks={layout.vpp}")
    return [
        *flags,
        f"--ep {layout.ep}",
        "--set dispatch=all_to_all_exact",
        f"--set sequence={run.sequence}",
        f"--set batch={run.microbatches * run.microbatch}",
        f"--set microbatches={run.microbatches}",
        f"--policy {policy}",
    ]


# --- Megatron-LM ---


def megatron_flags(run: Run) -> list[str]:
    """Of Megatron-LM's `pretrain_gpt.py`, for a run whose homes are `MegatronHomes`."""
    layout = run.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--context-parallel-size {layout.cp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--expert-model-parallel-size {layout.ep}",
        "--expert-tensor-parallel-size 1",  # its default is that of tensor parallelism
        *_MEGATRON_DISPATCHER[run.dispatcher],
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
    if run.parameters.gradient == 2:
        flags.append("--grad-reduce-in-bf16")
    if run.parameters.optimizer == 8:
        flags.append("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")
    if run.overlaps_dispatch:
        flags.append("--overlap-moe-expert-parallel-comm")
    if run.delays_weight_gradients:
        flags.append("--delay-wgrad-compute")
    return [*flags, *_megatron_graphs(run.graphs), *_megatron_homes(run.homes)]


def _megatron_graphs(scopes: Sequence[str]) -> list[str]:
    if "full" in scopes:
        return ["--cuda-graph-impl full_iteration"]
    names = {"router": "moe_router moe_preprocess"}
    found = " ".join(names.get(scope, scope) for scope in scopes)
    return [f"--cuda-graph-impl transformer_engine --cuda-graph-scope {found}"] if found else []


def _megatron_layout(placed: Sequence[int]) -> str:
    """Layers of each stage, in quotes for the shell: E is the embedding, t a layer, L the loss.

    >>> _megatron_layout([2, 2, 2, 1])
    "'Ett|(tt|)*2tL'"
    """
    first, *inner, last = placed
    runs = ((size, len(list(own))) for size, own in groupby(inner))
    stages = "".join(f"({'t' * size}|)*{count}" if count > 1 else f"{'t' * size}|" for size, count in runs)
    return f"'E{'t' * first}|{stages}{'t' * last}L'"


def _megatron_homes(homes: Homes) -> list[str]:
    if not isinstance(homes, MegatronHomes):
        return []
    if homes.full:
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    flags = []
    if homes.recompute:
        flags.append(f"--recompute-granularity selective --recompute-modules {' '.join(homes.recompute)}")
    if homes.offload:
        flags.append(f"--fine-grained-activation-offloading --offload-modules {' '.join(homes.offload)}")
    return flags


# --- torchtitan ---


def torchtitan_flags(run: Run) -> list[str]:
    """Of torchtitan's `run_train.sh`. It recomputes whole layers or none, and shards gradients from ZeRO 1 on."""
    layout = run.layout
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
    kind = "full" if isinstance(run.homes, MegatronHomes) and run.homes.full else "none"
    return [*flags, f"activation-checkpoint:{kind}"]  # a subcommand, which comes last


def _torchtitan_stages(run: Run) -> list[str]:
    """The number of stages follows from the layers of a stage, the embedding and the head counted."""
    stages, layers = run.layout.stages, run.config.layers
    if run.placed != place_as_torchtitan(layers, stages):
        raise ValueError(
            f"torchtitan has no flag for {layers} layers on {stages} stages so: set "
            "parallelism.module_fqns_per_model_part in its configuration"
        )
    return [
        f"--parallelism.pipeline_parallel_layers_per_stage {-(-(layers + 2) // stages)}",
        "--parallelism.pipeline_parallel_first_stage_less_layers 1",
        "--parallelism.pipeline_parallel_last_stage_less_layers 1",
    ]
