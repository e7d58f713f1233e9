"""The command line: options and help; `commands/` does the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import pagestash
from pagestash.commands import options
from pagestash.commands.options import PRESET_NAMES, SCHEDULE_NAMES

if TYPE_CHECKING:
    from pagestash.commands.step import StepOptions

app = typer.Typer(
    help="Activation memory for Mixture-of-Experts training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(pagestash.__version__)
        raise typer.Exit


@contextmanager
def _needs_train(command: str) -> Iterator[None]:
    """Say what to install if an import fails for lack of the extra `train`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        typer.echo(f"error: pagestash {command} needs safetensors: pip install 'pagestash[train]'", err=True)
        raise typer.Exit(2) from None


def _step(context: typer.Context) -> "StepOptions":
    """The options of a step to measure, among those that the command was given."""
    from pagestash.commands.step import StepOptions

    return StepOptions(**{item.name: context.params[item.name] for item in fields(StepOptions)})


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="The run's folder: metrics.jsonl and checkpoints.")],
    preset: Annotated[
        str | None, typer.Option(help=f"The model's shape: {PRESET_NAMES}.  [default: tiny]")
    ] = None,
    layers: options.Layers = None,
    steps: Annotated[int | None, typer.Option(help="The last step.  [default: 200]")] = None,
    policy: Annotated[str | None, typer.Option(help="none, or a policy file.  [default: none]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data.  [default: 0]")] = None,
    pipeline: Annotated[
        int | None, typer.Option(help="Ranks to divide the layers among.  [default: 1]")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"With --pipeline, its schedule: {SCHEDULE_NAMES}.  [default: 1F1B]")
    ] = None,
    expert: Annotated[
        int | None, typer.Option(help="Ranks to divide the experts among.  [default: all of a stage]")
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Text files or folders.  [default: Python's standard library]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings in a TOML file.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting; model.KEY for a field of the model."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
) -> None:
    """Train a decoder on the bytes of text files.

    Options override --set, which overrides --config. Ctrl-C ends the run with a checkpoint.
    """
    given: dict[str, Any] = {
        "preset": preset,
        "layers": layers,
        "steps": steps,
        "policy": policy,
        "seed": seed,
        "pipeline": pipeline,
        "schedule": schedule,
        "expert_parallel": expert,
        "corpus": tuple(corpus) if corpus else None,
    }
    with _needs_train("train"):
        from pagestash.commands.train import run
    code = run(
        {key: value for key, value in given.items() if value is not None},
        out,
        config=config,
        assignments=assignments or [],
        resume=resume,
    )
    raise typer.Exit(code)


@app.command()
def profile(
    context: typer.Context,
    preset: options.Preset = None,
    module: options.Module = None,
    layers: options.Layers = None,
    batch: options.Batch = 2,
    seq: options.Seq = 256,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    policy: Annotated[Path | None, typer.Option(help="A policy file: also show what it would do.")] = None,
    link: options.Link = None,
    repeats: options.Repeats = 3,
    gradients: options.Gradients = "held",
    depth: Annotated[
        int | None, typer.Option(help="Group regions by the first parts of their names.")
    ] = None,
    tensors: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Also list the saved tensors of these regions.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw bytes over the step, as PNG.")
    ] = None,
) -> None:
    """Show what a training step saves for backward: bytes by region, and what each home would save and cost."""
    from pagestash.commands.profile import ProfileOptions, run

    asked = ProfileOptions(
        step=_step(context), policy=policy, depth=depth, tensors=tensors, json=json, plot=plot
    )
    raise typer.Exit(run(asked))


@app.command()
def plan(
    context: typer.Context,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory at the peak, like 40GiB; 0.5: half of the saved bytes; auto: of this GPU."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for what `pagestash profile --json` measured; with --cluster, for layers of such times.",
        ),
    ] = None,
    preset: options.Preset = None,
    module: options.Module = None,
    layers: options.Layers = None,
    batch: options.Batch = 2,
    seq: options.Seq = 256,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    link: options.Link = None,
    repeats: options.Repeats = 3,
    gradients: options.Gradients = "held",
    optimizer: Annotated[
        str, typer.Option(help="Whose state is on the device, too: none, sgd, momentum or adamw.")
    ] = "none",
    host: Annotated[
        str, typer.Option(help="Pinned memory for offload, like 64GiB; auto: half of this machine's.")
    ] = "auto",
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="How received rows vary: Megatron's tokens_per_expert, or `measured`: the step's.",
        ),
    ] = None,
    expert: Annotated[
        int, typer.Option(help="Ranks to divide the experts of --rows among, if they are of all ranks.")
    ] = 1,
    skew: Annotated[
        float | None, typer.Option(help="Received rows are log-normal, with this max/mean over 64 layers.")
    ] = None,
    overflow: Annotated[
        float, typer.Option(help="With --rows or --skew: how often a step may overflow the pool.")
    ] = 1e-3,
    ranks: Annotated[
        int | None, typer.Option(help="Plan a pipeline of so many ranks; the step is one microbatch.")
    ] = None,
    schedule: Annotated[str, typer.Option(help=f"Of the pipeline: {SCHEDULE_NAMES}.")] = "1F1B",
    microbatches: Annotated[
        int | None, typer.Option(help="Of the pipeline, per step.  [default: twice the stages]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the policy as TOML; with --ranks, --cluster a folder of them."
        ),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw step time over memory, as PNG or SVG.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory over the step, before and after.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Devices, like gb200:256: search layouts and policies for a model instead."),
    ] = None,
    global_batch: Annotated[int, typer.Option(help="With --cluster: sequences of a step.")] = 1024,
    microbatch: Annotated[
        int | None, typer.Option(help="With --cluster: sequences of a microbatch.  [default: 1 or 2]")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="With --cluster, of products: bf16, fp8, mxfp8 or fp32.")
    ] = "bf16",
    zero: Annotated[int, typer.Option(help="With --cluster: ZeRO 0 to 3.")] = 1,
    profiled_on: options.ProfiledOn = None,
) -> None:
    """Find the fastest policy whose step is predicted to fit a budget of memory, and print what it takes.

    With --cluster, find the fastest layout of a model on devices that are not at hand, and a policy for each rank.
    """
    if cluster is not None:
        from pagestash.commands.plan_cluster import ClusterPlanOptions
        from pagestash.commands.plan_cluster import run as run_cluster

        if budget is not None or module is not None:
            typer.echo("error: --cluster has its own memory: no --budget or --module", err=True)
            raise typer.Exit(2)
        wanted = ClusterPlanOptions(
            model=preset or "deepseek-v3",
            cluster=cluster,
            layers=layers,
            global_batch=global_batch,
            seq=seq,
            microbatch=microbatch,
            precision=precision,
            zero=zero,
            profile=profile,
            profiled_on=profiled_on,
            out=out,
        )
        raise typer.Exit(run_cluster(wanted))
    if budget is None:
        typer.echo("error: --budget is missing: how much memory may the step take, like 40GiB?", err=True)
        raise typer.Exit(2)
    from pagestash.commands.plan import PlanOptions, run

    asked = PlanOptions(
        budget=budget,
        step=_step(context),
        profile=profile,
        optimizer=optimizer,
        host=host,
        rows=rows,
        expert=expert,
        skew=skew,
        overflow=overflow,
        ranks=ranks,
        schedule=schedule,
        microbatches=microbatches,
        out=out,
        curve=curve,
        plot=plot,
    )
    raise typer.Exit(run(asked))


@app.command()
def simulate(
    cluster: Annotated[
        str, typer.Option(help="Devices, like h100:256; h100, h200, b200, gb200 or a TOML file.")
    ],
    preset: Annotated[
        str, typer.Option(help=f"A preset, a config.json of Hugging Face, or a TOML file: {PRESET_NAMES}.")
    ] = "deepseek-v3",
    layers: options.Layers = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(help="Context parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 1,
    vpp: Annotated[int, typer.Option(help="Stages of each pipeline rank.")] = 1,
    zero: Annotated[int, typer.Option(help="What data parallel ranks share: ZeRO 0 to 3.")] = 1,
    schedule: Annotated[
        str | None, typer.Option(help=f"{SCHEDULE_NAMES}.  [default: 1F1B, with --vpp Interleaved1F1B]")
    ] = None,
    microbatch: options.MicrobatchSequences = 1,
    global_batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 1024,
    seq: options.SequenceTokens = 4096,
    precision: Annotated[str, typer.Option(help="Of products: bf16, fp8, mxfp8 or fp32.")] = "bf16",
    framework: Annotated[
        str, typer.Option(help="What is kept for backward: pagestash, megatron or pith.")
    ] = "pagestash",
    dispatcher: Annotated[
        str,
        typer.Option(help="alltoall: every row is sent; flex (DeepEP, HybridEP): a token once to a node."),
    ] = "alltoall",
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Dispatch beside the compute of another microbatch.")
    ] = False,
    delay_weight_gradients: Annotated[
        bool, typer.Option("--delay-weight-gradients", help="Weight gradients wait for their layer's end.")
    ] = False,
    graphs: Annotated[
        str, typer.Option(help="CUDA graphs of each layer's attn, router, mlp (commas between), or full.")
    ] = "",
    placement: Annotated[
        str | None, typer.Option(help="Layers of each stage, like 4,5,5,4.  [default: evenly]")
    ] = None,
    capacity: Annotated[
        float, typer.Option(help="Rows of static buffers over balanced rows; 0: exact sizes.")
    ] = 0.0,
    policy: Annotated[
        Path | None, typer.Option(help="A policy file, by hand or of `pagestash plan`.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Layers take the times of `pagestash profile --json`, scaled."),
    ] = None,
    profiled_on: options.ProfiledOn = None,
    skew: Annotated[
        float, typer.Option(help="Rows of the hottest rank over the mean, on average over layers.")
    ] = 1.0,
    rows: Annotated[
        Path | None, typer.Option(help="Row counts of a run instead: Megatron's tokens_per_expert.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw ranks over time, as SVG.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace, for Perfetto.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Predict a step on a cluster that is not at hand: memory and time of every pipeline rank. Nothing runs."""
    from pagestash.commands.simulate import SimulateOptions, run

    asked = SimulateOptions(
        model=preset,
        cluster=cluster,
        layers=layers,
        tp=tp,
        cp=cp,
        ep=ep,
        pp=pp,
        vpp=vpp,
        zero=zero,
        schedule=schedule,
        microbatch=microbatch,
        global_batch=global_batch,
        seq=seq,
        precision=precision,
        framework=framework,
        dispatcher=dispatcher,
        overlap=overlap,
        delay_weight_gradients=delay_weight_gradients,
        graphs=graphs,
        placement=placement,
        capacity=capacity,
        policy=policy,
        profile=profile,
        profiled_on=profiled_on,
        skew=skew,
        rows=rows,
        plot=plot,
        trace=trace,
        json=json,
    )
    raise typer.Exit(run(asked))


@app.command()
def partition(
    stages: Annotated[int, typer.Option(help="Stages of the pipeline, over all ranks.")],
    schedule: Annotated[
        str, typer.Option(help=f"Of torch.distributed.pipelining: {SCHEDULE_NAMES}.")
    ] = "1F1B",
    preset: Annotated[
        str, typer.Option(help=f"The model's shape; its costs come from formulas: {PRESET_NAMES}.")
    ] = "tiny",
    layers: options.Layers = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches per step.  [default: twice the stages]")
    ] = None,
    batch: options.MicrobatchSequences = 1,
    sequence: options.SequenceTokens = 4096,
    shards: Annotated[int, typer.Option(help="Ranks that a stage's parameters are sharded over.")] = 1,
    expert: Annotated[int, typer.Option(help="Of those, ranks that the experts are divided among.")] = 1,
    memory: Annotated[
        str, typer.Option(help="Memory of a rank, like 80GiB: of placements that fit, the fastest wins.")
    ] = "0",
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs: a file of `pagestash profile --json`, or a table.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Place layers on pipeline stages by memory, then by time, and print the table."""
    from pagestash.commands.partition import costs_of_file, costs_of_preset, main

    try:
        given = costs_of_preset(
            preset, layers, batch=batch, sequence=sequence, shards=shards, expert_parallel=expert
        )
        if costs is not None:
            given = costs_of_file(costs, given)
        main(given, stages, schedule, microbatches=microbatches, memory=memory, as_json=as_json)
    except ValueError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    out: Annotated[Path, typer.Option(help="A folder for pictures, profile and policy.")] = Path("out/demo"),
) -> None:
    """Profile a small MoE decoder on the CPU, plan for half of its activations, and train with and without."""
    for name, value, least, most in (("steps", steps, 1, 2**31 - 1), ("seed", seed, 0, 2**63 - 1)):
        if not least <= value <= most:
            typer.echo(f"error: --{name} {value}: expected {least} to {most}", err=True)
            raise typer.Exit(2)
    with _needs_train("demo"):
        from pagestash.commands.demo import main
    try:
        equal = main(steps, seed, out)
    except OSError as error:
        typer.echo(f"error: --out {out}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    if not equal:
        raise typer.Exit(1)


@app.command(name="jax-demo")
def jax_demo() -> None:
    """Train a small ring-of-experts model in JAX, plain against stashed, on four virtual devices."""
    try:
        from pagestash.jax.demo import main
    except ImportError as error:
        typer.echo(f"jax-demo needs the jax extra: pip install 'pagestash[jax]' ({error})", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(main([]))
