"""`pagestash simulate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pagestash.commands.checks import check_file, check_numbers, check_picture, exit_code
from pagestash.commands.options import PlanOptions, SimulateOptions
from pagestash.commands.show import note, show
from pagestash.policy import Policy
from pagestash.profiling.picture import write
from pagestash.row_counts.tokens_per_expert import read_tokens_per_expert
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.model.framework import ParameterBytes, framework
from pagestash.simulation.model.homes import PolicyHomes
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.read import read_model
from pagestash.simulation.model.regions import check_policy
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.trace import write_trace
from pagestash.simulation.result import simulate

Number = TypeVar("Number", int, float)


def run(options: SimulateOptions) -> int:
    """Simulate and print; returns the exit code."""
    return exit_code(lambda: _run(options))


def _run(options: SimulateOptions) -> None:
    check_picture("--plot", options.plot)
    check_file("--trace", options.trace)
    check_file("--json", options.json)
    made = run_of(options)
    found = simulate(made)
    show(found)
    if options.json is not None:
        body = found.to_json() | {"options": asdict(options)}
        options.json.write_text(json.dumps(body, indent=2, default=str) + "\n", encoding="utf-8")
    if options.trace is not None:
        write_trace(found.played, options.trace)
    if options.plot is not None:
        from pagestash.simulation.replay.plot import draw_step

        title = f"{Path(options.preset).stem} on {options.cluster}, {made.layout.schedule}"
        write(draw_step(found.played, title=title, capacity_bytes=made.cluster.device.memory), options.plot)


def run_of(options: SimulateOptions) -> Run:
    """The run that the options describe."""
    policy = Policy() if options.policy is None else Policy.load(options.policy)
    placed = None
    if options.placement is not None:
        placed = _numbers(int, "--placement", options.placement, "the layers of each stage, like 4,5,5,4")
    made = cluster_run(
        options,
        seq=options.seq,
        microbatch=options.microbatch,
        homes=PolicyHomes(policy),
        capacity=options.capacity,
        placement=placed,
        skew=skew_of(options),
        tp=options.tp,
        cp=options.cp,
        ep=options.ep,
        pp=options.pp,
        vpp=options.vpp,
        schedule=options.schedule or ("1F1B" if options.vpp == 1 else "Interleaved1F1B"),
    )
    unheard = check_policy(policy, layers_of(made)) if policy.rules else []
    if unheard:
        note(f"parts of a simulated layer are larger than the regions of these rules: {', '.join(unheard)}")
    return made


def cluster_run(
    options: SimulateOptions | PlanOptions, *, seq: int, microbatch: int = 1, **values: Any
) -> Run:
    """The run of what both commands have; `values` are fields of its `Run`, and of its layout."""
    check_numbers(**{"seq": seq, "microbatch": microbatch, "global-batch": options.global_batch})
    cluster = read_cluster(options.cluster or "")
    config = read_model(options.preset or "deepseek-v3", layers=options.layers)
    ways = {name: values.pop(name) for name in ("tp", "cp", "ep", "pp", "vpp", "schedule") if name in values}
    zero: Any = options.zero
    precision: Any = options.precision
    dispatcher: Any = options.dispatcher
    return Run(
        config=config,
        cluster=cluster,
        layout=Layout(devices=cluster.devices, zero=zero, **ways),
        sequence=seq,
        global_batch=options.global_batch,
        microbatch=microbatch,
        framework=framework(options.framework),
        precision=precision,
        overlaps_dispatch=options.overlap,
        delays_weight_gradients=options.delay_weight_gradients,
        dispatcher=dispatcher,
        graphs=tuple(options.graphs.split(",")) if options.graphs else (),
        parameters=parameters_of(options.parameter_bytes),
        reserve=reserve_of(options.reserve),
        **values,
    )


def parameters_of(text: str) -> ParameterBytes:
    """Bytes of a parameter: `2,4,12`."""
    expected = "those of weight, gradient and optimizer, like 2,4,12"
    found = _numbers(float, "--parameter-bytes", text, expected)
    if len(found) != 3:
        raise ValueError(f"--parameter-bytes {text}: expected {expected}")
    return ParameterBytes(**dict(zip(("weight", "gradient", "optimizer"), found)))


def reserve_of(text: str) -> float:
    """A part of the memory: `6%` or `0.06`."""
    plain = text.removesuffix("%")
    part = _numbers(float, "--reserve", plain, "a part of the device's memory, like 6%")[0]
    return part if plain == text else part / 100


def _numbers(kind: type[Number], option: str, text: str, expected: str) -> list[Number]:
    """Numbers with commas between them."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: expected {expected}") from None


def skew_of(options: SimulateOptions) -> float:
    """Received rows of the hottest rank over the mean."""
    if options.rows is None:
        return options.skew
    if options.skew != 1.0:
        raise ValueError("--rows has the distribution: pass no --skew beside it")
    return max(1.0, read_tokens_per_expert(options.rows).max_over_mean(options.ep))
