"""Options that several commands share, for typer. Imports no torch, so that `--help` is quick."""

from typing import Annotated

import typer

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

# A step to measure: `profile` and `plan`. `commands/step.py` has fields of these names.
Preset = Annotated[
    str | None, typer.Option(help=f"A model's published shape: {PRESET_NAMES}.  [default: tiny]")
]
Module = Annotated[
    str | None,
    typer.Option(metavar="PKG:NAME", help="A function that returns a model, or a model and its batch."),
]
Layers = Annotated[int | None, typer.Option(help="Cut the preset to this many layers.")]
Batch = Annotated[int, typer.Option(help="Sequences.")]
Seq = Annotated[int, typer.Option(help="Tokens per sequence.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="Dtype of the weights.  [default: bfloat16 on a GPU, float32 on a CPU]")
]
Autocast = Annotated[str | None, typer.Option(help="Run forward under autocast to this dtype.")]
Link = Annotated[
    str | None, typer.Option(help="Bytes per second to the host, like 50GB; on a GPU measured by default.")
]
Repeats = Annotated[int, typer.Option(help="Timed steps.")]
Gradients = Annotated[
    str, typer.Option(help="held: the step adds to gradients that are there; fresh: it finds none.")
]

# A step that is computed, not measured: `simulate`, `partition` and `plan --cluster`.
MicrobatchSequences = Annotated[int, typer.Option(help="Sequences of a microbatch.")]
SequenceTokens = Annotated[int, typer.Option(help="Tokens of a sequence.")]
ProfiledOn = Annotated[
    str | None,
    typer.Option(
        help="Where --profile was measured: h100, h200, b200, gb200 or a file.  [default: as --cluster]"
    ),
]
