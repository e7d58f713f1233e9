"""Time rows of `benchmarks/simulate.py`: what a home or overlap adds to a step, then absolute steps.

Constants are those of the cluster files; `FITTED` names the row that each was fitted to.
"""

from collections.abc import Iterator
from math import ceil

from benchmarks import published
from benchmarks.harness import Claim
from benchmarks.published_times import EARLIER, FITTED, HELD_OUT, SEEN, Timed
from benchmarks.simulated import EFFECT, Row
from pagestash.simulation.model.modules import model_operations
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.lengthened import step_seconds

ABSOLUTE = 0.12
SHARE = 11 / 15
"""Of steps, to be within the bar."""


def rows() -> list[Row]:
    return [*offload(), *overlap(), *moonlight(), *absolute()]


def claims(found: list[Row]) -> list[Claim]:
    """What share of rows is within its bar."""
    made = []
    for what, groups, share in (
        ("what offload adds to a step, within half of it", ["time, offload"], 1.0),
        ("what recompute adds to a step, within half of it", ["time, recompute"], 1.0),
        ("what overlap saves of a step, within half of it", ["time, overlap"], 1.0),
        ("steps within 12 %, no constant fitted to any", ["time, earlier", "time, seen"], SHARE),
        ("steps within 12 %, written down before they were predicted", ["time, held out"], SHARE),
    ):
        own = [row for row in found if row.group in groups and row.bar is not None]
        made.append(
            Claim(
                what=f"simulated time, {what}, of {len(own)}",
                value=sum(bool(row.holds) for row in own),
                bar=ceil(share * len(own)),
                better="at least",
            )
        )
    return made


def seconds(run: Run) -> float:
    return step_seconds(run)[1]


def added(group: str, what: str, told: float, found: float, cause: str = "") -> Row:
    """A row of what something adds to a step, in percent."""
    return Row(group, what, "%", 100 * told, 100 * found, bar=EFFECT, cause=cause)


def offload() -> Iterator[Row]:
    for what, told, make in (
        ("H100, 14 layers", 321 / 315 - 1, published.seed_3a),
        ("GB200, DeepSeek-V3", 945 / 930 - 1, published.seed_3b),
    ):
        off, on = (seconds(make(offload)) for offload in (False, True))
        cause = "host copies beside compute are an estimate"
        yield added("time, offload", f"Megatron-LM #1913, {what}: offload adds", told, on / off - 1, cause)


def overlap() -> Iterator[Row]:
    for what, told, values in (
        ("HybridEP, graphs of the router", 24.7138 / 20.99203 - 1, published.HYBRIDEP),
        ("all-to-all", 41.25 / 31.31 - 1, {}),
    ):
        off, on = (
            seconds(published.bridge_qwen3(**values, overlaps_dispatch=beside)) for beside in (False, True)
        )
        cause = "with overlap it is bound by communication, whose rate is an estimate" if not values else ""
        name = f"Megatron-Bridge, Qwen3-30B-A3B on 16 H100, {what}: overlap saves"
        yield added("time, overlap", name, told, off / on - 1, cause)


def moonlight() -> Iterator[Row]:
    plain = seconds(published.bridge_moonlight(()))
    told_plain = published.MOONLIGHT_RUNS[()][1]
    for names, (_, told) in published.MOONLIGHT_RUNS.items():
        if names:
            found = seconds(published.bridge_moonlight(names)) / plain - 1
            what = f"Megatron-Bridge, Moonlight on 8 H100: recompute of {', '.join(names)} adds"
            cause = "the step is bound by the host, and predicted too short"
            yield added("time, recompute", what, told / told_plain - 1, found, cause)


def absolute() -> Iterator[Row]:
    for group, items in (
        ("time, fitted", FITTED.values()),
        ("time, earlier", EARLIER),
        ("time, seen", SEEN),
        ("time, held out", HELD_OUT),
    ):
        for item in items:
            told, found = speeds(item)
            bar = None if group == "time, fitted" else ABSOLUTE
            what = f"{item.what} ({item.source})"
            yield Row(group, what, "tokens/s", told, found, bar=bar, cause=item.cause)


def speeds(item: Timed) -> tuple[float, float]:
    """Tokens a second of one GPU, told and predicted."""
    run = item.run()
    tokens = run.global_batch * run.sequence / run.cluster.devices
    told = item.told
    if item.unit == "s":
        told = tokens / told
    elif item.unit == "TFLOPS":
        told *= 1e12 * run.global_batch * run.sequence / model_operations(run)
    return told, tokens / seconds(run)
