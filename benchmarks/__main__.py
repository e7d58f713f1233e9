"""`python -m benchmarks <name> | all | table`."""

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from benchmarks import tables
from benchmarks.harness import UnknownPreset

BENCHMARKS = (
    "pool",
    "graphed_stack",
    "moe_layer",
    "moe_step",
    "overlap",
    "hf_step",
    "hf_lora",
    "rivals",
    "megatron",
    "offload",
    "offload_deep",
    "hooks",
    "eight_bits",
    "plan",
    "out_of_memory",
    "simulate",
    "step_memory",
    "pipeline",
    "pipeline_gpu",
    "jax_stash",
)
"""One module each, with `run(out, quick) -> path of the result`."""
NEED_CUDA = (
    "pool",
    "graphed_stack",
    "moe_layer",
    "moe_step",
    "hf_step",
    "hf_lora",
    "rivals",
    "megatron",
    "offload",
    "offload_deep",
    "out_of_memory",
    "pipeline_gpu",
)

Out = Annotated[Path | None, typer.Option(help="Folder for the result; benchmarks/results if not given.")]
Quick = Annotated[bool, typer.Option(help="Smaller and shorter: to see that it runs, not for the record.")]

app = typer.Typer(help="Measure, and keep what was measured.", no_args_is_help=True)


def load(name: str) -> ModuleType | str:
    """The benchmark's module, or the reason why it cannot run here."""
    try:
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            return "there is no such benchmark yet"
        if name in NEED_CUDA and not importlib.import_module("torch").cuda.is_available():
            return "it needs a CUDA GPU"
        return importlib.import_module(f"benchmarks.{name}")
    except ImportError as error:
        return f"it needs a package that is not installed ({error})"


def report(path: Path) -> bool:
    """Print the claims of a result; whether all of them hold."""
    claims = json.loads(path.read_text())["claims"]
    for claim in claims:
        verdict = "holds " if claim["holds"] else "MISSED"
        print(f"{verdict} {claim['value']:.4g} ({claim['better']} {claim['bar']:g}) {claim['what']}")
    print(path)
    return all(claim["holds"] for claim in claims)


def run_one(name: str, out: Path | None, quick: bool, **options: Any) -> None:
    module = load(name)
    if isinstance(module, str):
        print(f"{name}: cannot run, {module}")
        raise typer.Exit(2)
    if not report(module.run(out, quick, **options)):
        raise typer.Exit(1)


def _command(name: str) -> Callable[..., None]:
    def command(out: Out = None, quick: Quick = False) -> None:
        run_one(name, out, quick)

    return command


@app.command()
def pool(
    out: Out = None,
    quick: Quick = False,
    tune: Annotated[bool, typer.Option(help="Sweep the kernels' constants and print the best.")] = False,
) -> None:
    """Stash, restore and spill against plain copies."""
    if not tune:
        run_one("pool", out, quick)
        return
    module = load("pool")
    if isinstance(module, str):
        print(f"pool: cannot run, {module}")
        raise typer.Exit(2)
    module.tune()


@app.command()
def plan(
    out: Out = None,
    quick: Quick = False,
    resume: Annotated[
        bool, typer.Option(help="Go on behind the models that this commit has measured.")
    ] = False,
    models: Annotated[
        int | None, typer.Option(min=1, help="Measure so many at most, and leave others for --resume.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Measure this preset alone, into plan_part.json.")] = None,
    part: Annotated[
        list[float] | None,
        typer.Option(min=0.01, max=1, help="Plan for this part of the bytes alone; may be repeated."),
    ] = None,
) -> None:
    """Plans: what is predicted against what is measured, and against policies by hand."""
    options = {"parts": tuple(part)} if part else {}
    try:
        run_one("plan", out, quick, resume=resume, models=models, only=only, **options)
    except UnknownPreset as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None


@app.command()
def rivals(
    out: Out = None,
    quick: Quick = False,
    longest: Annotated[
        bool, typer.Option(help="How long a sequence each way can take, not its time.")
    ] = False,
) -> None:
    """Other ways to train with less memory, and ours: time over memory."""
    run_one("rivals", out, quick, longest=longest)


for _name in [name for name in BENCHMARKS if name not in ("pool", "plan", "rivals")]:
    app.command(_name, help=f"Run benchmarks/{_name}.py.")(_command(_name))


@app.command("all")
def run_all(out: Out = None, quick: Quick = False) -> None:
    """Every benchmark that can run here; exits 1 if a claim is missed."""
    held = True
    for name in BENCHMARKS:
        module = load(name)
        if isinstance(module, str):
            print(f"{name}: skipped, {module}")
            continue
        print(f"{name}:")
        held &= report(module.run(out, quick))
    raise typer.Exit(0 if held else 1)


@app.command()
def table(
    check: Annotated[bool, typer.Option(help="Change nothing; exit 1 if the table is stale.")] = False,
) -> None:
    """Write the tables of results: docs/results.md, and the README's."""
    stale = []
    for page, text in (
        (tables.PAGE, tables.render(tables.RESULTS)),
        (tables.README, tables.rivals(tables.RESULTS)),
    ):
        try:
            changed = tables.update(page, text, check=check)
        except ValueError as error:
            print(f"{page.name}: {error}")
            raise typer.Exit(2) from None
        stale += [page.name] if changed else []
    rivals = tables.RESULTS / "rivals.json"
    if rivals.exists() and not check:
        importlib.import_module("benchmarks.rivals").draw(
            json.loads(rivals.read_text())["rows"], tables.PAGE.parent
        )
    if check and stale:
        print(f"stale: {', '.join(stale)}; run `python -m benchmarks table`")
        raise typer.Exit(1)
    print(f"written: {', '.join(stale)}" if stale else "up to date")


if __name__ == "__main__":
    app()
