"""`simulate`: one step of a run, what each rank holds and does, and whether it fits."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pagestash.simulation.costs.build import step_costs
from pagestash.simulation.costs.costs import RankCosts
from pagestash.simulation.model.modules import model_operations
from pagestash.simulation.model.run import Run
from pagestash.simulation.replay.played import RankReplay, Replay
from pagestash.simulation.replay.programs import COMMUNICATION
from pagestash.simulation.replay.replay import replay
from pagestash.sizes import format_bytes

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One pipeline rank, as far as a table shows it."""

    rank: int
    layers: int
    static_bytes: int
    peak_bytes: int
    """Allocated at the peak."""
    device_bytes: int
    """With what is outside torch."""
    host_bytes: int
    compute: float
    """Seconds of forward, backward and weight gradients; recompute is in it."""
    recompute: float
    communication: float
    wait: float
    """For copies of offload."""
    idle: float
    """Seconds in which nothing runs: bubbles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A run's step."""

    run: Run
    played: Replay
    rows: tuple[RankRow, ...]

    @property
    def seconds(self) -> float:
        return self.played.seconds

    @property
    def tokens_a_second(self) -> float:
        """Of one device."""
        return self.run.global_batch * self.run.sequence / self.run.layout.devices / self.seconds

    @property
    def operations_a_second(self) -> float:
        """Of the model, without recompute, on one device."""
        return model_operations(self.run) / self.run.layout.devices / self.seconds

    @property
    def fullest(self) -> RankRow:
        return max(self.rows, key=lambda row: row.device_bytes)

    @property
    def verdict(self) -> Literal["OK", "TIGHT", "OOM"]:
        """TIGHT: it fits, if allocators and frameworks take less beyond tensors than the reserve."""
        if self.lacks:
            return "OOM"
        return "OK" if self.fullest.device_bytes <= self.run.room else "TIGHT"

    @property
    def lacks(self) -> str:
        """What keeps it from running; empty if it fits."""
        memory, host = self.run.cluster.device.memory, self.run.cluster.host_bytes_a_device
        most = self.fullest
        if most.device_bytes > memory:
            return f"{format_bytes(most.device_bytes - memory)} of device memory on rank {most.rank}"
        most = max(self.rows, key=lambda row: row.host_bytes)
        if most.host_bytes > host:
            return f"{format_bytes(most.host_bytes - host)} of host memory on rank {most.rank}"
        return ""

    def to_json(self) -> dict[str, Any]:
        layout = asdict(self.run.layout)
        return {
            "cluster": self.run.cluster.name,
            "layout": layout | {"dp": self.run.layout.dp},
            "microbatches": self.run.microbatches,
            "seconds": self.seconds,
            "tokens_per_second_per_device": self.tokens_a_second,
            "operations_per_second_per_device": self.operations_a_second,
            "bubble": self.played.bubble(),
            "events": self.played.events,
            "verdict": self.verdict,
            "lacks": self.lacks,
            "ranks": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        layout, cluster = self.run.layout, self.run.cluster
        ways = ("tp", "cp", "ep", "pp", "vpp", "dp")
        degrees = ", ".join(f"{name.upper()} {getattr(layout, name)}" for name in ways)
        lines = [
            f"{cluster.name}:{cluster.devices}  {degrees}, ZeRO {layout.zero}",
            f"{layout.schedule}, {self.run.microbatches} microbatches of "
            f"{self.run.microbatch} × {self.run.sequence} tokens, as {self.run.framework.name} keeps them",
            "",
            *_table(self.rows),
            "GiB of tensors: static are weights, gradients and optimizer, host is offloaded.",
            "rows: dispatch and combine; waits: for copies of offload.",
            "",
            f"step       {_time(self.seconds)}, {100 * self.played.bubble():.1f} % of it bubble",
            f"a device   {self.tokens_a_second:,.0f} tokens/s, "
            f"{self.operations_a_second / 1e12:,.0f} TFLOP/s of the model",
        ]
        most = self.fullest
        free = 1 - most.device_bytes / cluster.device.memory
        told = f"lacks {self.lacks}" if self.lacks else f"{100 * free:.1f} % free"
        room, beside = format_bytes(cluster.device.memory), format_bytes(cluster.device.outside)
        lines += [
            f"memory     {self.verdict}: {told}; a device has {room}, the reserve is {100 * self.run.reserve:g} %",
            f"           rank {most.rank}: {format_bytes(most.peak_bytes)} of tensors, and {beside} beside torch",
        ]
        return "\n".join(lines)


def simulate(run: Run) -> Simulated:
    """One step."""
    costs = step_costs(run)
    played = replay(costs)
    rows = tuple(
        _row(at, played.seconds, rank, own) for at, (rank, own) in enumerate(zip(costs.ranks, played.ranks))
    )
    return Simulated(run=run, played=played, rows=rows)


def _row(at: int, step: float, rank: RankCosts, own: RankReplay) -> RankRow:
    seconds = defaultdict(float, own.seconds())
    return RankRow(
        rank=at,
        layers=len(rank.layer_names),
        static_bytes=sum(rank.peak.groups[name] for name in ("weights", "gradients", "optimizer")),
        peak_bytes=rank.peak.total,
        device_bytes=rank.device_bytes,
        host_bytes=max(rank.peak.host, own.host_bytes),
        compute=sum(seconds[kind] for kind in ("forward", "backward", "weight", "recompute", "stash")),
        recompute=seconds["recompute"],
        communication=sum(seconds[kind] for kind in COMMUNICATION),
        wait=seconds["wait"],
        idle=step - own.busy(),
    )


def _table(rows: Sequence[RankRow]) -> list[str]:
    cells = [["rank", "layers", "static", "peak", "host", "compute", "rows", "waits", "idle"]]
    for row in rows:
        static, peak, host = (f"{n / GIB:,.1f}" for n in (row.static_bytes, row.peak_bytes, row.host_bytes))
        times = (row.compute, row.communication, row.wait, row.idle)
        cells.append([str(row.rank), str(row.layers), static, peak, host if row.host_bytes else "–"])
        cells[-1] += [_time(seconds) if seconds else "–" for seconds in times]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = ["  ".join(f"{text:>{width}}" for text, width in zip(row, widths)) for row in cells]
    lines.insert(1, "-" * len(lines[0]))
    return lines


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
