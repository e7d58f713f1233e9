"""The command line: options and help; `commands/` does the work."""

from typing import Annotated

import typer

import pagestash
from pagestash.cli.computed import partition, simulate
from pagestash.cli.measured import doctor, plan, profile, verify
from pagestash.cli.training import demo, jax_demo, train

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


for command in (train, profile, plan, verify, simulate, partition, doctor, demo, jax_demo):
    app.command()(command)
