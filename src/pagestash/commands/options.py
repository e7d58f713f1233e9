"""The options of every command, declared once: a field is an option of the command line, and what a command reads.

A class's docstring is the help of its command. Imports no torch, so that `--help` is quick.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

# Written out here, because --help must not import torch.
PRESETS = ("tiny", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b")
SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
PRESET_NAMES, SCHEDULE_NAMES = ", ".join(PRESETS), ", ".join(SCHEDULES)

# Groups of options in --help.
MODEL, STEP, PLAN, PIPELINE = "Model", "Step to measure", "Plan", "Pipeline"
CLUSTER, LAYOUT, RUN, OUTPUT = "Cluster", "Layout", "How it runs", "Output"


def shown(text: str, group: str = "", *names: str, metavar: str | None = None) -> Any:
    """An option with this help, in a group of it."""
    return Option(*names, help=text, rich_help_panel=group or None, metavar=metavar)


Layers = Annotated[int | None, shown("Cut the preset to this many layers.", MODEL)]
Microbatch = Annotated[int, shown("Sequences of a microbatch.", RUN)]
Seq = Annotated[int, shown("Tokens of a sequence.", RUN)]
Json = Annotated[Path | None, shown("Write the result as JSON.", OUTPUT, metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """A step to measure."""

    preset: Annotated[
        str | None, shown(f"A model's published shape: {PRESET_NAMES}. Default: tiny.", MODEL)
    ] = None
    module: Annotated[
        str | None,
        shown("A function that returns a model, or a model and its batch.", MODEL, metavar="PKG:NAME"),
    ] = None
    layers: Layers = None
    batch: Annotated[int, shown("Sequences.", STEP)] = 2
    seq: Annotated[int | None, shown("Tokens of a sequence. Default: 256; with --cluster 4096.", STEP)] = None
    device: Annotated[str, shown("auto, cpu or cuda.", STEP)] = "auto"
    dtype: Annotated[
        str | None, shown("Dtype of the weights. Default: bfloat16 on a GPU, float32 on a CPU.", STEP)
    ] = None
    autocast: Annotated[str | None, shown("Run forward under autocast to this dtype.", STEP)] = None

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return 256 if self.seq is None else self.seq


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions(StepOptions):
    """A step to measure and time."""

    link: Annotated[
        str | None, shown("Bytes per second to the host, like 50GB; on a GPU measured by default.", STEP)
    ] = None
    repeats: Annotated[int, shown("Timed steps.", STEP)] = 3
    gradients: Annotated[
        str, shown("held: the step adds to gradients that are there; fresh: it finds none.", STEP)
    ] = "held"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(MeasuredOptions):
    """Show what a training step saves for backward: bytes by region, and what each home would save and cost."""

    policy: Annotated[Path | None, shown("A policy: also show what it would do.", STEP, metavar="FILE")] = (
        None
    )
    depth: Annotated[int | None, shown("Group regions by the first parts of their names.", OUTPUT)] = None
    tensors: Annotated[
        str | None, shown("Also list the saved tensors of these regions.", OUTPUT, metavar="PATTERN")
    ] = None
    json: Json = None
    plot: Annotated[Path | None, shown("Draw bytes over the step, as PNG.", OUTPUT, metavar="FILE")] = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(StepOptions):
    """Run steps with and without a policy, and compare all that they compute to the last bit.

    Ends with 0 if it is equal, and with 1 if it differs or the policy is refused.
    """

    policy: Annotated[Path, shown("The policy.", metavar="FILE")]
    steps: Annotated[int, shown("Steps of each run.", STEP)] = 3
    optimizer: Annotated[str, shown("That updates the weights: none, sgd, momentum or adamw.", STEP)] = (
        "adamw"
    )
    graphed: Annotated[bool, shown("Run the steps as CUDA graphs (GraphedStep).", STEP, "--graphed")] = False


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """How a step runs on a cluster, beside its layout."""

    global_batch: Annotated[int, shown("Sequences of a step.", RUN)] = 1024
    precision: Annotated[str, shown("Of products: bf16, fp8, mxfp8 or fp32.", RUN)] = "bf16"
    dispatcher: Annotated[
        str, shown("alltoall: every row is sent; flex (DeepEP, HybridEP): a token once to a node.", RUN)
    ] = "alltoall"
    overlap: Annotated[
        bool, shown("Dispatch beside the compute of another microbatch.", RUN, "--overlap")
    ] = False
    delay_weight_gradients: Annotated[
        bool, shown("Weight gradients wait for their layer's end.", RUN, "--delay-weight-gradients")
    ] = False
    graphs: Annotated[
        str, shown("CUDA graphs of each layer's attn, router, mlp (commas between), or full.", RUN)
    ] = ""
    zero: Annotated[int, shown("What data parallel ranks share: ZeRO 0 to 3.", LAYOUT)] = 1
    parameter_bytes: Annotated[
        str, shown("Bytes of a parameter's weight, gradient and optimizer state.", RUN)
    ] = "2,4,12"
    reserve: Annotated[
        str,
        shown(
            "Part of the memory to leave free, for what allocators and frameworks take beyond tensors.",
            CLUSTER,
        ),
    ] = "6%"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(ClusterOptions):
    """Predict a step on a cluster that is not at hand: memory and time of every pipeline rank. Nothing runs."""

    cluster: Annotated[str, shown("Devices, like h100:256; h100, h200, b200, gb200 or a TOML file.", CLUSTER)]
    preset: Annotated[
        str, shown(f"A preset, a config.json of Hugging Face, or a TOML file: {PRESET_NAMES}.", MODEL)
    ] = "deepseek-v3"
    layers: Layers = None
    tp: Annotated[int, shown("Tensor parallel ranks.", LAYOUT)] = 1
    cp: Annotated[int, shown("Context parallel ranks.", LAYOUT)] = 1
    ep: Annotated[int, shown("Expert parallel ranks.", LAYOUT)] = 1
    pp: Annotated[int, shown("Pipeline ranks.", LAYOUT)] = 1
    vpp: Annotated[int, shown("Stages of each pipeline rank.", LAYOUT)] = 1
    schedule: Annotated[
        str | None, shown(f"{SCHEDULE_NAMES}. Default: 1F1B, with --vpp Interleaved1F1B.", LAYOUT)
    ] = None
    placement: Annotated[
        str | None, shown("Layers of each stage, like 4,5,5,4. Default: evenly.", LAYOUT)
    ] = None
    microbatch: Microbatch = 1
    seq: Seq = 4096
    framework: Annotated[
        str, shown("What is kept for backward: pagestash, megatron, torchtitan or pith.", RUN)
    ] = "pagestash"
    capacity: Annotated[float, shown("Rows of static buffers over balanced rows; 0: exact sizes.", RUN)] = 0.0
    policy: Annotated[
        Path | None, shown("A policy, by hand or of `pagestash plan`.", RUN, metavar="FILE")
    ] = None
    skew: Annotated[float, shown("Rows of a layer's hottest rank over the mean.", RUN)] = 1.0
    rows: Annotated[
        Path | None, shown("Row counts of a run instead: Megatron's tokens_per_expert.", RUN, metavar="FILE")
    ] = None
    plot: Annotated[Path | None, shown("Draw ranks over time, as SVG.", OUTPUT, metavar="FILE")] = None
    trace: Annotated[Path | None, shown("Write a Chrome trace, for Perfetto.", OUTPUT, metavar="FILE")] = None
    json: Json = None


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Find the constants of your cluster by one measured run, for `simulate` and `plan --cluster mine.toml:64`."""

    run: Annotated[Path, shown("The run, simulated: a file of `pagestash simulate --json`.", metavar="FILE")]
    measured: Annotated[str, shown("Its measured step, like 41.2s or 850ms.")]
    peak: Annotated[str | None, shown("Allocated bytes at its fullest rank's peak, like 71GiB.")] = None
    out: Annotated[Path, shown("The cluster's file.", metavar="FILE")] = Path("mine.toml")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ClusterOptions, MeasuredOptions):
    """Find the fastest policy whose step is predicted to fit a budget of memory, and print what it takes.

    With --cluster, find the fastest layout of a model on devices that are not at hand, and homes that fit.
    """

    budget: Annotated[
        str | None,
        shown(
            "Device memory at the peak, like 40GiB; 0.5: half of the saved bytes; auto: of this GPU.", PLAN
        ),
    ] = None
    profile: Annotated[
        Path | None,
        shown(
            "Plan for what `pagestash profile --json` measured.",
            PLAN,
            metavar="FILE",
        ),
    ] = None
    optimizer: Annotated[
        str, shown("Whose state is on the device, too: none, sgd, momentum or adamw.", PLAN)
    ] = "none"
    host: Annotated[
        str, shown("Pinned memory for offload, like 64GiB; auto: this rank's share of the machine's.", PLAN)
    ] = "auto"
    graphed: Annotated[bool, shown("The step will run as a CUDA graph (GraphedStep).", PLAN, "--graphed")] = (
        False
    )
    waits: Annotated[bool, shown("The loop waits for the device before each step.", PLAN, "--waits")] = False
    rows: Annotated[
        str | None,
        shown(
            "How received rows vary: Megatron's tokens_per_expert, or `measured`: the step's.",
            PLAN,
            metavar="FILE",
        ),
    ] = None
    skew: Annotated[
        float | None, shown("Received rows are log-normal, with this max/mean over 64 layers.", PLAN)
    ] = None
    overflow: Annotated[
        float | None,
        shown("With --rows or --skew: how often a step may overflow the pool. Default: 0.001.", PLAN),
    ] = None
    schedule: Annotated[str | None, shown(f"Of a pipeline: {SCHEDULE_NAMES}. Default: 1F1B.", PIPELINE)] = (
        None
    )
    microbatches: Annotated[
        int | None, shown("Of a pipeline, per step. Default: twice the stages.", PIPELINE)
    ] = None
    pp: Annotated[
        int | None, shown("Plan a pipeline of so many ranks; the step is one microbatch.", LAYOUT)
    ] = None
    ep: Annotated[
        int | None, shown("Expert parallel ranks: with --rows, those to divide its experts among.", LAYOUT)
    ] = None
    tp: Annotated[int | None, shown("With --cluster: tensor parallel ranks.", LAYOUT)] = None
    cp: Annotated[int | None, shown("With --cluster: context parallel ranks.", LAYOUT)] = None
    vpp: Annotated[int | None, shown("With --cluster: stages of each pipeline rank.", LAYOUT)] = None
    cluster: Annotated[
        str | None, shown("Devices, like gb200:256: search layouts and homes for a model instead.", CLUSTER)
    ] = None
    framework: Annotated[
        str, shown("With --cluster, whose homes and flags: pagestash, megatron or torchtitan.", RUN)
    ] = "pagestash"
    microbatch: Annotated[
        int | None, shown("With --cluster: sequences of a microbatch. Default: 1 or 2.", RUN)
    ] = None
    out: Annotated[
        Path | None,
        shown(
            "Write the policy as TOML; with --pp or --cluster a folder of what was planned.",
            OUTPUT,
            metavar="FILE",
        ),
    ] = None
    curve: Annotated[
        Path | None, shown("Draw step time over memory, as PNG or SVG.", OUTPUT, metavar="FILE")
    ] = None
    plot: Annotated[
        Path | None, shown("Draw memory over the step, before and after.", OUTPUT, metavar="FILE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Place layers on pipeline stages by memory, then by time, and print the table."""

    stages: Annotated[int, shown("Stages of the pipeline, over all ranks.", PIPELINE)]
    schedule: Annotated[str, shown(f"Of torch.distributed.pipelining: {SCHEDULE_NAMES}.", PIPELINE)] = "1F1B"
    preset: Annotated[
        str, shown(f"The model's shape; its costs come from formulas: {PRESET_NAMES}.", MODEL)
    ] = "tiny"
    layers: Layers = None
    costs: Annotated[
        Path | None,
        shown("Measured costs: a file of `pagestash profile --json`, or a table.", MODEL, metavar="FILE"),
    ] = None
    microbatches: Annotated[
        int | None, shown("Microbatches per step. Default: twice the stages.", PIPELINE)
    ] = None
    microbatch: Microbatch = 1
    seq: Seq = 4096
    shards: Annotated[int, shown("Ranks that a stage's parameters are sharded over.", LAYOUT)] = 1
    ep: Annotated[int, shown("Of those, ranks that the experts are divided among.", LAYOUT)] = 1
    memory: Annotated[
        str, shown("Memory of a rank, like 80GiB: of placements that fit, the fastest wins.", LAYOUT)
    ] = "0"
    json: Json = None


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a decoder on the bytes of text files.

    Options override --set, which overrides --config. Ctrl-C ends the run with a checkpoint.
    """

    out: Annotated[Path, shown("The run's folder: metrics.jsonl and checkpoints.")]
    preset: Annotated[str | None, shown(f"The model's shape: {PRESET_NAMES}. Default: tiny.", MODEL)] = None
    layers: Layers = None
    steps: Annotated[int | None, shown("The last step. Default: 200.", RUN)] = None
    policy: Annotated[str | None, shown("none, or a policy file. Default: none.", RUN)] = None
    seed: Annotated[int | None, shown("Seed of weights and data. Default: 0.", RUN)] = None
    pp: Annotated[int | None, shown("Ranks to divide the layers among. Default: 1.", LAYOUT)] = None
    schedule: Annotated[
        str | None, shown(f"With --pp, its schedule: {SCHEDULE_NAMES}. Default: 1F1B.", LAYOUT)
    ] = None
    ep: Annotated[
        int | None, shown("Ranks to divide the experts among. Default: all of a stage.", LAYOUT)
    ] = None
    overlap: Annotated[
        bool | None,
        shown(
            "Run exchanges with other ranks beside the compute of another microbatch.",
            PIPELINE,
            "--overlap/--no-overlap",
        ),
    ] = None
    corpus: Annotated[
        list[str] | None, shown("Text files or folders. Default: Python's standard library.", RUN)
    ] = None
    config: Annotated[Path | None, shown("Settings in TOML.", metavar="FILE")] = None
    assignments: Annotated[
        list[str] | None,
        shown("One setting; model.KEY for a field of the model.", "", "--set", metavar="KEY=VALUE"),
    ] = None
    resume: Annotated[bool, shown("Resume the run in --out.", "", "--resume")] = False


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Profile a small MoE decoder on the CPU, plan for half of its activations, and train with and without."""

    steps: Annotated[int, shown("Training steps of each run.")] = 10
    seed: Annotated[int, shown("Seed of weights and data.")] = 0
    out: Annotated[Path, shown("A folder for pictures, profile and policy.")] = Path("out/demo")
