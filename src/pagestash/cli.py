"""The command line."""

from typing import Annotated

import typer

import pagestash

app = typer.Typer(
    help="Activation memory for Mixture-of-Experts training.", no_args_is_help=True, add_completion=False
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


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 12,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the stack.")] = 6,
    capacity: Annotated[int, typer.Option(min=64, help="Rows of every buffer; a quarter are valid.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Train a small stack with and without the stash: equal losses, fewer bytes until backward."""
    from pagestash.demo import DemoConfig, main

    if not main(DemoConfig(steps=steps, layers=layers, capacity=capacity, seed=seed)):
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
