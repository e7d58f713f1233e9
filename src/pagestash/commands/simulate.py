"""`pagestash simulate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from pagestash.commands.checks import check_file, check_numbers, check_picture, exit_code
from pagestash.commands.options import SimulateOptions
from pagestash.commands.show import note, show
from pagestash.models.config import DecoderConfig
from pagestash.policy import Policy
from pagestash.profiling.picture import write
from pagestash.row_counts.distribution import RowDistribution
from pagestash.row_counts.tokens_per_expert import read_tokens_per_expert
from pagestash.simulation.cluster.cluster import PRECISIONS, Cluster, Precision, load_cluster, read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.costs.dispatch import DISPATCHERS, Dispatcher
from pagestash.simulation.costs.homes import PolicyHomes
from pagestash.simulation.costs.measured import measured
from pagestash.simulation.costs.run import GRAPHED, Run
from pagestash.simulation.model.framework import ParameterBytes, framework
from pagestash.simulation.model.modules import layers_of
from pagestash.simulation.model.read import read_model
from pagestash.simulation.model.regions import check_policy
from pagestash.simulation.replay.trace import write_trace
from pagestash.simulation.result import simulate

Zero = Literal[0, 1, 2, 3]


def run(options: SimulateOptions) -> int:
    """Simulate and print; returns the exit code."""
    return exit_code(lambda: _run(options))


def _run(options: SimulateOptions) -> None:
    check_picture("--plot", options.plot)
    check_file("--trace", options.trace)
    check_file("--json", options.json)
    made = run_of(options)
    found = simulate(made, rows_of(options))
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
    check_numbers(
        **{"seq": options.seq, "microbatch": options.microbatch, "global-batch": options.global_batch}
    )
    cluster = read_cluster(options.cluster)
    schedule = options.schedule or ("1F1B" if options.vpp == 1 else "Interleaved1F1B")
    layout = Layout(
        devices=cluster.devices,
        tp=options.tp,
        cp=options.cp,
        ep=options.ep,
        pp=options.pp,
        vpp=options.vpp,
        zero=zero_of(options.zero),
        schedule=schedule,
    )
    config = read_model(options.preset, layers=options.layers)
    made = Run(
        config=config,
        cluster=cluster,
        layout=layout,
        sequence=options.seq,
        global_batch=options.global_batch,
        microbatch=options.microbatch,
        homes=PolicyHomes(Policy() if options.policy is None else Policy.load(options.policy)),
        framework=framework(options.framework),
        precision=precision_of(options.precision),
        capacity=options.capacity,
        overlaps_dispatch=options.overlap,
        delays_weight_gradients=options.delay_weight_gradients,
        dispatcher=dispatcher_of(options.dispatcher),
        graphs=graphs_of(options.graphs),
        placement=None if options.placement is None else placement_of(options.placement),
        factors=factors_of(options.profile, options.profiled_on, config, cluster),
        parameters=parameters_of(options.parameter_bytes),
        reserve=reserve_of(options.reserve),
    )
    if options.policy is not None:
        unheard = check_policy(Policy.load(options.policy), layers_of(made.shape))
        if unheard:
            note(
                f"parts of a simulated layer are larger than the regions of these rules: {', '.join(unheard)}"
            )
    return made


def factors_of(
    profile: Path | None, profiled_on: str | None, config: DecoderConfig, cluster: Cluster
) -> dict[str, tuple[float, float]]:
    """Measured over roofline seconds of a profile's parts; what it says nothing of is a note on stderr."""
    if profile is None:
        if profiled_on is not None:
            raise ValueError("--profiled-on names the device of a --profile, and there is none")
        return {}
    from pagestash.profiling.profiled import ProfiledStep

    device = cluster if profiled_on is None else load_cluster(profiled_on, 1)
    try:
        found = measured(ProfiledStep.load(profile), config, device)
    except ValueError as error:
        raise ValueError(f"--profile {profile}: {error}") from error
    for text in found.notes():
        note(text)
    return found.factors


def precision_of(text: str) -> Precision:
    for known in PRECISIONS:
        if text == known:
            return known
    raise ValueError(f"--precision {text}: expected one of {', '.join(PRECISIONS)}")


def dispatcher_of(text: str) -> Dispatcher:
    for known in DISPATCHERS:
        if text == known:
            return known
    raise ValueError(f"--dispatcher {text}: expected {' or '.join(DISPATCHERS)}")


def graphs_of(text: str) -> tuple[str, ...]:
    """Scopes of CUDA graphs: `attn,router`, or `full` by itself."""
    found = tuple(text.split(",")) if text else ()
    if any(scope not in GRAPHED for scope in found) or ("full" in found and len(found) > 1):
        parts = ", ".join(scope for scope in GRAPHED if scope != "full")
        raise ValueError(f"--graphs {text}: expected some of {parts} with commas between them, or full")
    return found


def parameters_of(text: str) -> ParameterBytes:
    """Bytes of a parameter: `2,4,12`."""
    try:
        weight, gradient, optimizer = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"--parameter-bytes {text}: expected those of weight, gradient and optimizer, like 2,4,12"
        ) from None
    return ParameterBytes(weight=weight, gradient=gradient, optimizer=optimizer)


def reserve_of(text: str) -> float:
    """A part of the memory: `6%` or `0.06`."""
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise ValueError(f"--reserve {text}: expected a part of the device's memory, like 6%")
    return part


def placement_of(text: str) -> tuple[int, ...]:
    """Layers of each stage: `4,5,5,4`."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--placement {text}: expected the layers of each stage, like 4,5,5,4")
    return tuple(map(int, words))


def zero_of(value: int) -> Any:
    if value not in get_args(Zero):
        raise ValueError(f"--zero {value}: expected 0, 1, 2 or 3")
    return value


def rows_of(options: SimulateOptions) -> RowDistribution | None:
    """The distribution of received rows; None: balanced."""
    if options.rows is not None:
        if options.skew != 1.0:
            raise ValueError("--rows has the distribution: pass no --skew beside it")
        return read_tokens_per_expert(options.rows)
    if options.skew < 1:
        raise ValueError(
            f"--skew {options.skew:g}: expected the hottest rank's rows over the mean, 1 or more"
        )
    if options.capacity and options.capacity < options.skew:
        raise ValueError(
            f"--capacity {options.capacity:g} holds less than --skew {options.skew:g} times the balanced rows"
        )
    if options.skew == 1 or options.ep == 1:
        return None
    return RowDistribution.log_normal(options.skew, draws=options.ep)
