"""The constants of a cluster: what a measured run has over its prediction."""

from dataclasses import replace

from pagestash.simulation.cluster.cluster import Calibration
from pagestash.simulation.costs.build import rank_peaks
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.lengthened import step_seconds

LEAST = 0.05
ROUNDS = 20


def calibrated(run: Run, seconds: float, peak_bytes: int | None = None) -> Calibration:
    """The constants with which the run is predicted to take so long, and as much memory at its peak.

    Kernels are no faster than hardware allows: a run that is faster still, or slower than `LEAST` explains, is a
    `ValueError`.
    """
    cluster = run.cluster
    low, high = LEAST, 1 / max(cluster.matmul.efficiency, cluster.device.memory_efficiency)

    def predicted(kernels: float) -> float:
        calibration = replace(cluster.calibration, kernels=kernels)
        return step_seconds(replace(run, cluster=replace(cluster, calibration=calibration)))[1]

    slowest, fastest = predicted(low), predicted(high)
    if not fastest <= seconds <= slowest:
        raise ValueError(
            f"measured {seconds:g} s: at any rate of kernels, this run takes {fastest:.3g} to {slowest:.3g} s; "
            "is it of this cluster, and of one step?"
        )
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) > seconds else (low, middle)
    plain = replace(run, cluster=replace(cluster, calibration=Calibration()))
    told = max(peak.total for peak in rank_peaks(plain))
    return Calibration(
        kernels=round((low + high) / 2, 4),
        allocated=cluster.calibration.allocated if peak_bytes is None else round(peak_bytes / told, 4),
    )
