"""`pagestash plan --cluster`: the layout and the policies for a model on a cluster."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap

from pagestash.commands.checks import check_numbers
from pagestash.commands.options import PlanOptions
from pagestash.commands.show import continued, show
from pagestash.commands.simulate import cluster_run
from pagestash.simulation.model.homes import MegatronHomes
from pagestash.simulation.model.run import Run
from pagestash.simulation.search.flags import megatron_flags, pagestash_flags, torchtitan_flags
from pagestash.simulation.search.homes import Planned, joined
from pagestash.simulation.search.layouts import Wanted
from pagestash.simulation.search.search import ClusterPlan, describe, search, shares
from pagestash.sizes import format_bytes

JOINED = "policy.toml"
"""The policies of all ranks in one file: each names layers of its own."""
WIDTH = 80
FLAGS: dict[str, Callable[[Run], list[str]]] = {
    "pagestash": lambda run: pagestash_flags(run, JOINED),
    "megatron": megatron_flags,
    "torchtitan": torchtitan_flags,
}
"""By framework."""


def run(options: PlanOptions) -> None:
    """Search and print."""
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out}: expected a folder")
    found = search(wanted_of(options), progress=_progress)
    show(report(found))
    if options.out is not None:
        write(found, options.out)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wanted_of(options: PlanOptions) -> Wanted:
    """What the options ask for."""
    fixed = {name: getattr(options, name) for name in ("tp", "cp", "ep", "pp", "vpp")}
    fixed = {name: value for name, value in fixed.items() if value is not None}
    if options.framework not in FLAGS:
        raise ValueError(f"--framework {options.framework}: expected one of {', '.join(FLAGS)}")
    if options.framework == "pagestash":  # whose training has no such ranks
        fixed = {"tp": 1, "cp": 1} | fixed
    check_numbers(microbatch=options.microbatch, **fixed)
    return Wanted(
        base=cluster_run(options, seq=4096 if options.seq is None else options.seq),
        microbatches=(1, 2) if options.microbatch is None else (options.microbatch,),
        fixed=fixed,
    )


def report(found: ClusterPlan) -> str:
    """The chosen layout, its policies and flags, and the runners-up."""
    best = found.best
    run_, costs = best.run, best.costs
    tokens = run_.global_batch * run_.sequence / run_.cluster.devices / best.seconds
    most = max(rank.device_bytes for rank in costs.ranks)
    host = max(rank.peak.host for rank in costs.ranks)
    lines = [
        f"{run_.cluster.name}:{run_.cluster.devices}  {describe(run_)}, {run_.microbatches} microbatches",
        f"({found.looked_at} layouts divide and hold their weights; as {run_.framework.name} keeps tensors)",
        f"step    {best.seconds:.2f} s, {tokens:,.0f} tokens/s a device",
        *wrap(_shares(best), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8),
        f"memory  {format_bytes(most)} of {format_bytes(run_.cluster.device.memory)} a device, "
        f"{format_bytes(host)} on the host;",
        f"        {100 * run_.reserve:g} % are left for what allocators and frameworks take beyond tensors",
        "",
    ]
    if isinstance(run_.homes, MegatronHomes):
        lines.append(f"homes   {run_.homes}")
    for number, policy in enumerate(best.policies):
        rules = ", ".join(f"{rule.match} {rule.home}" for rule in policy.rules)
        told = f"rank {number:<3} {rules or 'no policy: it fits'}"
        lines += wrap(told, WIDTH, subsequent_indent=" " * 9)
    lines += ["", f"{'runners-up':<40}{'step':>8}  lacks"]
    for other in found.others:
        time = f"{other.seconds:.2f} s" if other.played is not None else "–"
        lines.append(f"{describe(other.run):<40}{time:>8}  {found.lacks(other)}")
    lines += ["", f"flags of {run_.framework.name}", _flags(best)]
    return "\n".join(lines)


def _shares(item: Planned) -> str:
    parts = sorted(shares(item).items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{name} {100 * own / item.seconds:.0f} %" for name, own in parts if own > 0.01 * item.seconds
    )


def _flags(item: Planned) -> str:
    """The framework's flags, or why it has none for this layout."""
    try:
        return continued(FLAGS[item.run.framework.name](item.run))
    except ValueError as error:
        return f"({error})"


def write(found: ClusterPlan, folder: Path) -> None:
    """A policy file for each rank and one for all, if ranks have policies; flags; the table as text and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    best = found.best
    if best.policies:
        for number, policy in enumerate(best.policies):
            policy.save(folder / f"policy-rank{number}.toml")
        joined(best.policies).save(folder / JOINED)
    (folder / "flags.txt").write_text(_flags(best) + "\n", encoding="utf-8")
    (folder / "plan.txt").write_text(report(found) + "\n", encoding="utf-8")
    rows = [
        {
            "layout": describe(item.run),
            "seconds": item.seconds if item.played is not None else None,
            "bound": item.bound,
            "lacks": "" if item is best else found.lacks(item),
        }
        for item in (best, *found.others)
    ]
    (folder / "plan.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
