"""Commands that run on this machine: `profile`, `plan`, `verify`, `doctor`. Imports no torch: `--help` is quick."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagestash.commands import options
from pagestash.commands.options import SCHEDULE_NAMES

if TYPE_CHECKING:
    from pagestash.commands.step import StepOptions


CLUSTER = {"global_batch", "microbatch", "precision", "zero", "profiled_on"}
CLUSTER_TOO = {"cluster", "preset", "layers", "seq", "profile", "out"}
"""Options of `plan`: those that only --cluster takes, and those that it takes, too."""


def _given(context: typer.Context) -> set[str]:
    """The options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _refuse(names: set[str], why: str) -> None:
    """Refuse options that would change nothing; the first in the alphabet is named."""
    for name in sorted(names):
        typer.echo(f"error: --{name.replace('_', '-')} {why}", err=True)
        raise typer.Exit(2)


def _step(context: typer.Context) -> "StepOptions":
    """The options of a step to measure, among those that the command was given."""
    from pagestash.commands.step import StepOptions

    return StepOptions(**{item.name: context.params[item.name] for item in fields(StepOptions)})


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
        str,
        typer.Option(help="Pinned memory for offload, like 64GiB; auto: this rank's share of the machine's."),
    ] = "auto",
    graphed: Annotated[
        bool, typer.Option("--graphed", help="The step will run as a CUDA graph (GraphedStep).")
    ] = False,
    waits: Annotated[
        bool, typer.Option("--waits", help="The loop waits for the device before each step.")
    ] = False,
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
        float | None,
        typer.Option(help="With --rows or --skew: how often a step may overflow the pool.  [default: 0.001]"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Plan a pipeline of so many ranks; the step is one microbatch.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"Of the pipeline: {SCHEDULE_NAMES}.  [default: 1F1B]")
    ] = None,
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
    given = _given(context)
    if cluster is not None:
        from pagestash.commands.plan_cluster import ClusterPlanOptions
        from pagestash.commands.plan_cluster import run as run_cluster

        if budget is not None or module is not None:
            typer.echo("error: --cluster has its own memory: no --budget or --module", err=True)
            raise typer.Exit(2)
        _refuse(given - CLUSTER - CLUSTER_TOO, "is for a measured step: no --cluster beside it")
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
    _refuse(given & CLUSTER, "is for a model on a cluster: pass --cluster, too")
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
        graphed=graphed,
        waits=waits,
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


def verify(
    policy: Annotated[Path, typer.Option(help="The policy file.")],
    preset: options.Preset = None,
    module: options.Module = None,
    layers: options.Layers = None,
    batch: options.Batch = 2,
    seq: options.Seq = 256,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 3,
    optimizer: Annotated[
        str, typer.Option(help="That updates the weights: none, sgd, momentum or adamw.")
    ] = "adamw",
    graphed: Annotated[
        bool, typer.Option("--graphed", help="Run the steps as CUDA graphs (GraphedStep).")
    ] = False,
) -> None:
    """Run steps with and without a policy, and compare all that they compute to the last bit.

    Ends with 0 if it is equal, and with 1 if it differs or the policy is refused.
    """
    from pagestash.commands.step import StepOptions
    from pagestash.commands.verify import VerifyOptions, run

    step = StepOptions(
        preset=preset,
        module=module,
        layers=layers,
        batch=batch,
        seq=seq,
        device=device,
        dtype=dtype,
        autocast=autocast,
    )
    asked = VerifyOptions(policy=policy, step=step, steps=steps, optimizer=optimizer, graphed=graphed)
    raise typer.Exit(run(asked))


def doctor() -> None:
    """Say what this machine has: versions, GPUs, the link both ways, memory to pin, and what to install."""
    from pagestash.commands.doctor import run

    raise typer.Exit(run())
