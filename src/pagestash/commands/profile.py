"""`pagestash profile`."""

from rich.console import Console

from pagestash.commands.checks import check_file, check_numbers, check_picture, exit_code
from pagestash.commands.options import ProfileOptions
from pagestash.commands.show import columns
from pagestash.commands.step import measure
from pagestash.policy import Policy, Rule

WIDE_COLUMNS = 140
"""Width of the full table."""


def run(options: ProfileOptions) -> int:
    """Profile and print; returns the exit code."""
    return exit_code(lambda: _run(options))


def _run(options: ProfileOptions) -> None:
    _check(options)
    found, _ = measure(options, None if options.policy is None else Policy.load(options.policy))
    console = Console(width=columns())
    console.print(found.table(depth=options.depth, narrow=console.width < WIDE_COLUMNS))
    if options.tensors is not None:
        console.print(found.tensor_table(options.tensors))
    if options.json is not None:
        found.save(options.json)
    if options.plot is not None:
        found.plot(options.plot)


def _check(options: ProfileOptions) -> None:
    """Check the options before anything is measured."""
    check_numbers(depth=options.depth)
    check_file("--json", options.json)
    check_picture("--plot", options.plot)
    if options.tensors is not None:
        Rule(options.tensors, "keep")
