"""`pagestash calibrate`: the constants of a cluster, by one measured run."""

import json
import re
from dataclasses import fields
from pathlib import Path

from pagestash.commands.checks import check_file, exit_code
from pagestash.commands.options import CalibrateOptions, SimulateOptions
from pagestash.commands.simulate import run_of
from pagestash.simulation.cluster.cluster import Calibration, cluster_file
from pagestash.simulation.model.run import Run
from pagestash.simulation.search.calibrate import calibrated
from pagestash.sizes import parse_bytes


def run(options: CalibrateOptions) -> int:
    """Find the constants and write the cluster's file; returns the exit code."""
    return exit_code(lambda: _run(options))


def _run(options: CalibrateOptions) -> None:
    check_file("--out", options.out)
    if options.out.suffix != ".toml":
        raise ValueError(f"--out {options.out}: expected a TOML file")
    given = simulated(options.run)
    seconds = seconds_of(options.measured)
    peak = None if options.peak is None else parse_bytes(options.peak, "--peak")
    made = run_of(given)
    found = calibrated(made, seconds, peak)
    source = f"fitted to {options.run.name}: a step of {options.measured}"
    source += f", a peak of {options.peak}" if options.peak else ""
    name = given.cluster.rpartition(":")[0]
    text = cluster_file(name).read_text(encoding="utf-8")
    options.out.write_text(with_calibration(text, found, source), encoding="utf-8")
    print(told(made, found, options))


def simulated(path: Path) -> SimulateOptions:
    """The options of a file that `pagestash simulate --json` wrote."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))["options"]
        known = {item.name for item in fields(SimulateOptions)} - {"json", "plot", "trace"}
        values = {key: value for key, value in given.items() if key in known}
        for key in ("policy", "rows"):
            values[key] = None if values.get(key) is None else Path(values[key])
        return SimulateOptions(**values)
    except OSError as error:
        raise ValueError(f"--run {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--run {path}: expected what `pagestash simulate --json` wrote ({error!r})"
        ) from error


def seconds_of(text: str) -> float:
    """`41.2s`, `850ms`, or a number of seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|)", text)
    if found is None or not float(found[1]):
        raise ValueError(f"--measured {text}: expected the time of a step, like 41.2s or 850ms")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def with_calibration(text: str, found: Calibration, source: str) -> str:
    """A cluster's file with these constants instead of its own."""
    plain = re.sub(r"^\[calibration\].*?(?=^\[|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).rstrip()
    return (
        f"{plain}\n\n[calibration]                 # {source}\n"
        f"kernels = {found.kernels:g}\nallocated = {found.allocated:g}\n"
    )


def told(made: Run, found: Calibration, options: CalibrateOptions) -> str:
    before = made.cluster.calibration
    lines = [
        f"kernels    {found.kernels:.3f} of what their efficiencies promise, {before.kernels:.3f} before"
    ]
    if options.peak is not None:
        lines.append(
            f"allocated  {found.allocated:.3f} of the predicted bytes, {before.allocated:.3f} before"
        )
    return "\n".join(
        [*lines, f"written to {options.out}: use it as --cluster {options.out}:{made.cluster.devices}"]
    )
