"""Time rows of `benchmarks/simulate.py`: ratios of matched runs, then absolute steps, by rules 13 to 17."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from benchmarks import published
from benchmarks.harness import Claim
from benchmarks.simulated import Row
from pagestash.simulation.build import Run, step_costs
from pagestash.simulation.cluster import Cluster
from pagestash.simulation.search import step_seconds

POINT = 0.01
"""One point of a ratio."""
ABSOLUTE = 0.10
FITTED = {"gb200": "DeepSeek-V3 on 256 GB200", "h100": "Qwen3-30B-A3B on 16 H100, overlap"}
"""The row that each GPU's constant is fitted on."""


def rows() -> list[Row]:
    return [*ratios(), *overlap(), *moonlight(), *absolute()]


def claims(found: list[Row]) -> list[Claim]:
    """One claim for each bar; a group of absolute rows has the share of its rows within the bar."""
    made = []
    for group, what in (
        ("time, offload", "offload on over off, seeds 2 and 3: points off"),
        ("time, Moonlight", "recompute over none, Moonlight: points off"),
    ):
        own = [row for row in found if row.group == group]
        points = max(100 * abs(row.predicted - row.published) for row in own)
        made.append(
            Claim(
                what=f"simulated time, {what}, largest of {len(own)}",
                value=round(points, 2),
                bar=1.0 if group == "time, offload" else 3.0,
                better="at most",
            )
        )
    checked = [row for row in found if row.group == "time, absolute" and row.holds is not None]
    made.append(
        Claim(
            what=f"simulated time, steps checked that are off by more than 10 %, of {len(checked)}",
            value=sum(not row.holds for row in checked),
            bar=0,
            better="at most",
        )
    )
    return made


def seconds(run: Run) -> float:
    return step_seconds(run)[1]


# --- ratios ---


def ratios() -> Iterator[Row]:
    """Steps with offload over steps without, as speeds: nothing fitted."""
    for what, told, make in (
        ("Megatron-LM #1913, H100, 14 layers", 315 / 321, published.seed_3a),
        ("Megatron-LM #1913, GB200, DeepSeek-V3", 930 / 945, published.seed_3b),
    ):
        off, on = (seconds(with_constant(make(offload))) for offload in (False, True))
        yield Row("time, offload", f"{what}: speed with offload", "", told, off / on, bar=POINT / told)
    off, on = (seconds(with_constant(published.seed_2(offload))) for offload in (False, True))
    told = 1249.7 / 1253.8
    what = "Megatron-LM #1752, PP2 VPP2 EP4: speed with offload"
    cause = "shapes are not stated: two layers a chunk of width 5,120, 16,384 tokens"
    yield Row("time, offload", what, "", told, off / on, bar=POINT / told, cause=cause)


def overlap() -> Iterator[Row]:
    """Steps without overlap over steps with it, with the constant of the GPU."""
    for what, told, values in (
        ("HybridEP, graphs of the router", 24.7138 / 20.99203, published.HYBRIDEP),
        ("all-to-all", 41.25 / 31.31, {}),
    ):
        off, on = (
            seconds(with_constant(published.bridge_qwen3(**values, overlaps_dispatch=beside)))
            for beside in (False, True)
        )
        cause = "with overlap it is bound by communication, whose rate is an estimate" if not values else ""
        name = f"Megatron-Bridge, Qwen3-30B-A3B on 16 H100, {what}: speed with overlap"
        yield Row("time, overlap", name, "", told, off / on, cause=cause)


def moonlight() -> Iterator[Row]:
    """Steps with recompute over the one without."""
    plain = seconds(with_constant(published.bridge_moonlight(())))
    told_plain = published.MOONLIGHT_RUNS[()][1]
    for names, (_, told) in published.MOONLIGHT_RUNS.items():
        if names:
            ratio = seconds(with_constant(published.bridge_moonlight(names))) / plain
            yield Row(
                "time, Moonlight",
                f"Megatron-Bridge, Moonlight-16B on 8 H100, recompute: {' + '.join(names)}",
                "",
                told / told_plain,
                ratio,
                bar=3 * POINT / (told / told_plain),
                cause="the step is bound by the host, and predicted as 0.33 s: too short for what recompute adds",
            )


# --- absolute ---

TOKENS: dict[str, tuple[float, str]] = {
    "DeepSeek-V3 on 256 GB200": (4912, ""),
    "Qwen3-30B-A3B on 8 GB200": (39936, "one constant for all shapes and models"),
    "Qwen3-235B on 256 GB200": (7280, "one constant for all shapes and models"),
    "Qwen3-30B-A3B on 16 H100, overlap": (1024 * 4096 / 16 / 20.147, ""),
    "Qwen3-30B-A3B on 16 H100, no overlap": (1024 * 4096 / 16 / 24.7138, ""),
    "Qwen3-30B-A3B on 16 H100, all-to-all": (
        1024 * 4096 / 16 / 42.21,
        "one constant for all shapes and models",
    ),
    "Qwen3-30B-A3B on 16 H100, FP8": (8826, "bound by launches, whose number is an estimate"),
    "Qwen3-235B on 256 H100, FP8": (1712, "one constant for all shapes and models"),
}
"""Tokens a second of one GPU as published, and the likely cause where the row is missed."""
TFLOPS: dict[str, tuple[float, str]] = {
    "DeepSeek-V3 on 256 GB200, seed 3": (945, "a Megatron-LM ten months older than that of the fitted row"),
    "DeepSeek-V3's layers on 64 H100, all-to-all": (225.1, "one constant for all shapes and models"),
    "DeepSeek-V3's layers on 64 H100, seed 3": (321, "one constant for all shapes and models"),
}
"""The same, of runs that give operations."""


def cases() -> dict[str, tuple[float, str]]:
    found = dict(TOKENS)
    for what, (told, cause) in TFLOPS.items():
        costs = step_costs(case(what))
        found[what] = 1e12 * told * costs.tokens / costs.model_operations, cause
    return found


def case(name: str) -> Run:
    interleaved = "Interleaved1F1B"
    match name:
        case "DeepSeek-V3 on 256 GB200":
            return published.report_v3(("mla_up_proj",), precision="mxfp8", **published.FULL_ITERATION)
        case "DeepSeek-V3 on 256 GB200, seed 3":
            return published.seed_3b(False)
        case "Qwen3-30B-A3B on 8 GB200":
            return published.run(
                published.QWEN3_30B,
                "gb200:8",
                {"ep": 8},
                global_batch=512,
                microbatch=4,
                precision="mxfp8",
                **published.FULL_ITERATION,
            )
        case "Qwen3-235B on 256 GB200":
            return published.run(
                published.QWEN3_235B,
                "gb200:256",
                {"pp": 8, "vpp": 3, "ep": 32, "schedule": interleaved},
                global_batch=8192,
                precision="mxfp8",
                **published.FULL_ITERATION,
            )
        case "Qwen3-30B-A3B on 16 H100, overlap":
            return published.bridge_qwen3(**published.HYBRIDEP, overlaps_dispatch=True)
        case "Qwen3-30B-A3B on 16 H100, no overlap":
            return published.bridge_qwen3(**published.HYBRIDEP)
        case "Qwen3-30B-A3B on 16 H100, all-to-all":
            return published.bridge_qwen3()
        case "Qwen3-30B-A3B on 16 H100, FP8":
            return published.bridge_qwen3(dispatcher="flex", precision="fp8")
        case "Qwen3-235B on 256 H100, FP8":
            return published.run(
                published.QWEN3_235B,
                "h100:256",
                {"tp": 2, "pp": 8, "vpp": 4, "ep": 32, "schedule": interleaved},
                global_batch=8192,
                precision="fp8",
                overlaps_dispatch=True,
                delays_weight_gradients=True,
            )
        case "DeepSeek-V3's layers on 64 H100, all-to-all":
            return published.overlapped_v3(overlap=False)
        case _:
            return published.seed_3a(False)


def speed(run: Run) -> float:
    """Tokens a second of one GPU."""
    return run.global_batch * run.sequence / run.cluster.devices / seconds(run)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """With so many times the efficiency of its kernels."""
    matmul = replace(
        cluster.matmul,
        efficiency=cluster.matmul.efficiency * factor,
        attention_efficiency=cluster.matmul.attention_efficiency * factor,
    )
    device = replace(cluster.device, memory_efficiency=cluster.device.memory_efficiency * factor)
    return replace(cluster, matmul=matmul, device=device)


@cache
def constant(name: str) -> float:
    """The efficiency of a GPU's kernels over that of its file, fitted on one row."""
    told, run = cases()[FITTED[name]][0], case(FITTED[name])
    low, high = 0.3, 1 / max(run.cluster.matmul.efficiency, run.cluster.device.memory_efficiency)
    for _ in range(7):
        middle = (low + high) / 2
        if speed(replace(run, cluster=scaled(run.cluster, middle))) < told:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def with_constant(run: Run) -> Run:
    """The run on a cluster with the fitted efficiency of its GPU."""
    return replace(run, cluster=scaled(run.cluster, constant(run.cluster.name)))


def absolute() -> Iterator[Row]:
    for what, (told, cause) in cases().items():
        run = case(what)
        name = run.cluster.name
        found = speed(with_constant(run))
        fitted = what in FITTED.values()
        note = f" (fitted: {constant(name):.2f} of the file's efficiency)" if fitted else ""
        yield Row(
            "time, absolute",
            f"{what}{note}",
            "tokens/s",
            told,
            found,
            bar=None if fitted else ABSOLUTE,
            cause=cause,
        )
