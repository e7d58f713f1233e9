"""`pagestash plan --cluster`: the layout and the policies for a model on a cluster."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pagestash.commands.checks import check_numbers, exit_code
from pagestash.commands.simulate import factors_of, precision_of, zero_of
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.run import Run
from pagestash.simulation.model.read import read_model
from pagestash.simulation.search.flags import megatron_flags, pagestash_flags, torchtitan_flags
from pagestash.simulation.search.homes import joined
from pagestash.simulation.search.layouts import Wanted
from pagestash.simulation.search.search import Found, Search, describe, search
from pagestash.sizes import format_bytes

JOINED = "policy.toml"
"""The policies of all ranks in one file: each names layers of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlanOptions:
    """The options of the command line."""

    model: str
    cluster: str
    layers: int | None = None
    global_batch: int = 1024
    seq: int = 4096
    microbatch: int | None = None
    precision: str = "bf16"
    zero: int = 1
    overlap: bool = False
    profile: Path | None = None
    profiled_on: str | None = None
    fixed: dict[str, int] = field(default_factory=dict)
    out: Path | None = None


def run(options: ClusterPlanOptions) -> int:
    """Search and print; returns the exit code. A cluster that nothing fits is bad input."""
    return exit_code(lambda: _run(options))


def _run(options: ClusterPlanOptions) -> None:
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out}: expected a folder")
    wanted = wanted_of(options)
    found = search(wanted, progress=_progress)
    print(report(found))
    if options.out is not None:
        write(found, options.out)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wanted_of(options: ClusterPlanOptions) -> Wanted:
    """What the options ask for."""
    names = {"global-batch": options.global_batch, "seq": options.seq, "microbatch": options.microbatch}
    check_numbers(**names)
    config, cluster = read_model(options.model, layers=options.layers), read_cluster(options.cluster)
    base = Run(
        config=config,
        cluster=cluster,
        layout=Layout(devices=cluster.devices, zero=zero_of(options.zero)),
        sequence=options.seq,
        global_batch=options.global_batch,
        precision=precision_of(options.precision),
        overlaps_dispatch=options.overlap,
        factors=factors_of(options.profile, options.profiled_on, config, cluster),
    )
    sizes = (1, 2) if options.microbatch is None else (options.microbatch,)
    return Wanted(
        config=config,
        cluster=cluster,
        sequence=options.seq,
        global_batch=options.global_batch,
        base=base,
        microbatches=sizes,
        fixed=options.fixed,
    )


def report(found: Search) -> str:
    """The chosen layout, its policies and flags, and the runners-up."""
    best = found.best
    run_, costs = best.run, best.planned.costs
    tokens = run_.global_batch * run_.sequence / run_.cluster.devices / best.seconds
    lines = [
        f"{run_.cluster.name}:{run_.cluster.devices}  {describe(run_)}, {run_.microbatches} microbatches "
        f"({found.looked_at} layouts divide and hold their weights)",
        f"step    {best.seconds:.2f} s, {tokens:,.0f} tokens/s a device; {_shares(best)}",
        f"memory  {format_bytes(max(rank.device_bytes for rank in costs.ranks))} of "
        f"{format_bytes(run_.cluster.device.memory)} a device, "
        f"{format_bytes(max(rank.host_bytes for rank in costs.ranks))} on the host",
        "",
    ]
    for number, policy in enumerate(best.planned.policies):
        rules = ", ".join(f"{rule.match} {rule.home}" for rule in policy.rules)
        lines.append(f"rank {number:<3} {rules or 'no policy: it fits'}")
    lines += ["", "runners-up                                          step     lacks"]
    for other in found.others:
        time = f"{other.seconds:.2f} s" if other.played is not None else "–"
        lines.append(f"{describe(other.run):<48}  {time:>9}  {found.lacks(other)}")
    lines += ["", *_flags(best)]
    return "\n".join(lines)


def _shares(item: Found) -> str:
    shares = sorted(item.shares().items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{name} {100 * own / item.seconds:.0f} %" for name, own in shares if own > 0.01 * item.seconds
    )


def _flags(item: Found) -> list[str]:
    """A line for each program: its flags, or why it has none for this layout."""
    policies = item.planned.policies
    made = {
        "pagestash": lambda: pagestash_flags(item.run, JOINED),
        "megatron": lambda: megatron_flags(item.run, policies),
        "torchtitan": lambda: torchtitan_flags(item.run, policies),
    }
    lines = []
    for name, flags in made.items():
        try:
            told = " ".join(flags())
        except ValueError as error:
            told = f"({error})"
        lines.append(f"{name:<10}  {told}")
    return lines


def write(found: Search, folder: Path) -> None:
    """One policy file a rank and one for all, the flags, and the table as text and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    best = found.best
    for number, policy in enumerate(best.planned.policies):
        policy.save(folder / f"policy-rank{number}.toml")
    joined(best.planned.policies).save(folder / JOINED)
    (folder / "flags.txt").write_text("\n".join(_flags(best)) + "\n", encoding="utf-8")
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
