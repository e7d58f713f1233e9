"""Commands that compute what a step takes, and run none: `simulate` and `partition`.

Imports no torch, so that `--help` is quick.
"""

from pathlib import Path
from typing import Annotated

import typer

from pagestash.commands import options
from pagestash.commands.options import PRESET_NAMES, SCHEDULE_NAMES


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
