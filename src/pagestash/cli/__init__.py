"""The command line: a command is its options (`commands/options.py`) and the `run` of a module of `commands/`."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

import pagestash
from pagestash.commands import options

COMMANDS: dict[str, type] = {
    "train": options.TrainOptions,
    "profile": options.ProfileOptions,
    "plan": options.PlanOptions,
    "verify": options.VerifyOptions,
    "simulate": options.SimulateOptions,
    "calibrate": options.CalibrateOptions,
    "partition": options.PartitionOptions,
    "demo": options.DemoOptions,
}
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


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _command(name: str, kind: Any) -> Callable[..., None]:
    """A function with the fields of `kind` as its parameters, which typer reads."""

    def call(**given: Any) -> None:
        try:
            module = import_module(f"pagestash.commands.{name}")
        except ModuleNotFoundError as error:
            if error.name != "safetensors":
                raise
            typer.echo(f"error: pagestash {name} needs safetensors: pip install 'pagestash[train]'", err=True)
            raise typer.Exit(2) from None
        raise typer.Exit(module.run(kind(**given)))

    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            annotation=field.type,
            default=Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    ]
    made: Any = call
    made.__signature__ = Signature(parameters)
    made.__annotations__ = {field.name: field.type for field in fields(kind)}
    made.__doc__ = kind.__doc__
    return call


for command, kind in COMMANDS.items():
    app.command(command)(_command(command, kind))


@app.command()
def doctor() -> None:
    """Say what this machine has: versions, GPUs, the link both ways, memory to pin, and what to install."""
    from pagestash.commands.doctor import run

    raise typer.Exit(run())


@app.command()
def jax_demo() -> None:
    """Train a small ring-of-experts model in JAX, plain against stashed, on four virtual devices."""
    try:
        from pagestash.jax.demo import main
    except ImportError as error:
        typer.echo(f"jax-demo needs the jax extra: pip install 'pagestash[jax]' ({error})", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(main([]))
