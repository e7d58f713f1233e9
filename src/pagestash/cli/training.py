"""Commands that train: `train`, and the demos. Imports no torch, so that `--help` is quick."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pagestash.commands import options
from pagestash.commands.options import PRESET_NAMES, SCHEDULE_NAMES


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


def jax_demo() -> None:
    """Train a small ring-of-experts model in JAX, plain against stashed, on four virtual devices."""
    try:
        from pagestash.jax.demo import main
    except ImportError as error:
        typer.echo(f"jax-demo needs the jax extra: pip install 'pagestash[jax]' ({error})", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(main([]))
