"""`pagestash plan`: a policy for a step, or with --cluster a layout and homes. Imports torch for a step alone."""

from dataclasses import fields

from pagestash.commands.checks import exit_code
from pagestash.commands.options import ClusterOptions, PlanOptions

_OF_CLUSTER = {item.name for item in fields(ClusterOptions)} | {"tp", "cp", "vpp", "microbatch", "framework"}
"""Options that only --cluster takes."""
_WITH_CLUSTER = {"cluster", "preset", "layers", "seq", "out", "pp", "ep"}
"""And those that it takes, too."""


def run(options: PlanOptions) -> int:
    """Plan and print; returns the exit code. A budget that nothing fits is bad input."""
    return exit_code(lambda: _run(options))


def _run(options: PlanOptions) -> None:
    given = {item.name for item in fields(options) if getattr(options, item.name) != item.default}
    if options.cluster is not None:
        if given & {"budget", "module"}:
            raise ValueError("--cluster has its own memory: no --budget or --module")
        _refuse(given - _OF_CLUSTER - _WITH_CLUSTER, "is for a measured step: no --cluster beside it")
        from pagestash.commands.plan_cluster import run as run_cluster

        run_cluster(options)
        return
    _refuse(given & _OF_CLUSTER, "is for a model on a cluster: pass --cluster, too")
    if options.budget is None:
        raise ValueError("--budget is missing: how much memory may the step take, like 40GiB?")
    from pagestash.commands.plan_step import run as run_step

    run_step(options)


def _refuse(names: set[str], why: str) -> None:
    """Refuse options that would change nothing; the first in the alphabet is named."""
    for name in sorted(names):
        raise ValueError(f"--{name.replace('_', '-')} {why}")
