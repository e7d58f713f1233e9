"""What a step costs on a described cluster: the values that the replay reads, made by `build.step_costs`.

A *stage* is a number of consecutive layers on one pipeline rank; with virtual stages (VPP) a rank has several. All
values are of one rank of its tensor, context, expert and data parallel groups, whose ranks are alike while rows are
balanced, and of one microbatch. A rank that receives `s` times the balanced rows of a layer has

    seconds = fixed + s · routed        bytes = fixed + s · routed

Communication is not part of the compute seconds. Backward sends what forward received: `combine` before the
experts' backward, `dispatch` after it, as long as in forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pagestash.policy import HomeName
from pagestash.schedules.plan import Plan
from pagestash.simulation.cluster.cluster import HostLink
from pagestash.simulation.costs.launches import HostSeconds


@dataclass(frozen=True, slots=True)
class Amount:
    """Seconds or bytes: a part that is the same for all ranks, and a part in proportion to received rows."""

    fixed: float = 0.0
    routed: float = 0.0

    def at(self, skew: float = 1.0) -> float:
        """With `skew` times the balanced rows."""
        return self.fixed + skew * self.routed

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.fixed + other.fixed, self.routed + other.routed)

    def __mul__(self, factor: float) -> "Amount":
        return Amount(self.fixed * factor, self.routed * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer, the embedding or the head, for one microbatch."""

    name: str
    forward: Amount
    """Seconds of compute, collectives of tensor and context parallelism included."""
    backward_input: Amount
    backward_weight: Amount
    recompute: Amount = Amount()
    """Seconds of forward that backward repeats."""
    dispatches_again: bool = False
    """Whether that includes dispatch and combine."""
    stash_seconds: Amount = Amount()
    """Of copying into pages, and again of copying back."""
    dispatch_seconds: Amount = Amount()
    """With all links to itself; 0 where it is hidden behind compute by construction."""
    combine_seconds: Amount = Amount()
    gather_seconds: float = 0.0
    """Of gathering sharded weights (ZeRO 3), before forward and again before backward, beside compute."""
    saved: Mapping[HomeName, Amount] = field(default_factory=dict)
    """Bytes that forward saves for backward, by home: `recompute` are those dropped, `offload` those moved."""
    workspace: Amount = Amount()
    """Most temporary bytes while its backward runs; those that recompute brings back are included."""
    host: HostSeconds = HostSeconds()  # noqa: RUF009 -- a tuple
    """What the host takes to launch it."""

    def bytes_of(self, home: HomeName) -> Amount:
        return self.saved.get(home, Amount())

    @property
    def kept_bytes(self) -> Amount:
        """On the device between forward and backward, stashed rows included."""
        return self.bytes_of("keep") + self.bytes_of("stash")

    @property
    def moved_bytes(self) -> Amount:
        """Over the host link, out in forward and back in backward."""
        return self.bytes_of("offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage, for one microbatch."""

    stage: int
    rank: int
    """The pipeline rank that runs it."""
    layers: tuple[LayerCosts, ...]
    send_bytes: int
    """To the next stage in forward, and as many back in backward; 0 for the last."""

    def saved(self, home: HomeName) -> Amount:
        return sum((layer.bytes_of(home) for layer in self.layers), Amount())

    @property
    def kept_bytes(self) -> Amount:
        return self.saved("keep") + self.saved("stash")

    @property
    def moved_bytes(self) -> Amount:
        return self.saved("offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBytes:
    """What a rank holds for the whole run."""

    weights: int
    gradients: int
    optimizer: int
    pool: int = 0
    """Pages of the stash, headroom included."""
    outside: int = 0
    """CUDA context, NCCL and so on: not torch's; counts against the device, not against allocated bytes."""

    @property
    def allocated(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """One pipeline rank."""

    rank: int
    stages: tuple[StageCosts, ...]
    """In the order of the model."""
    plan: Plan
    static: StaticBytes
    peak_bytes: int
    """Allocated at the peak, balanced rows."""
    device_bytes: int
    """What the rank takes of the device: `peak_bytes` and what is outside torch."""
    host_bytes: int
    """Most on the host at one time: offloaded activations, host pages, offloaded optimizer state."""
    leaving_bytes: float = 0.0
    """What of a microbatch leaves for the host, on average."""
    gradient_seconds: float = 0.0
    """Of reducing gradients and gathering weights over data parallel ranks, once a step."""
    optimizer_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """One step of one pipeline group: everything that the replay needs."""

    schedule: str
    microbatches: int
    ranks: tuple[RankCosts, ...]
    host: HostLink
    send_rate: float
    """Bytes a second between neighbouring stages."""
    send_latency: float
    tokens: int
    """Tokens of the whole step, all pipelines."""
    model_operations: float
    """Floating-point operations of the whole step, forward and backward, without recompute."""
    devices: int
    """Devices of the whole run."""
    overlaps_dispatch: bool = False
    """Whether dispatch and combine of one microbatch run beside the compute of another."""
    beside_compute: float = 1.0
    """Seconds of dispatch and combine beside compute, over those alone."""
    taken_by_dispatch: float = 0.0
    """The share of compute that dispatch and combine take while they run beside it."""
    margin: Literal["window", "last"] = "window"
    """How offloaded groups leave and return: by a keeper's window, or as Megatron-LM moves them."""
    waits_for_rows: bool = False
    """Whether the host waits in every forward for the number of received rows."""
    memory_rate: float = float("inf")
    """Bytes a second of the device's memory, which copies over the host link take from compute beside them."""

    @property
    def stages(self) -> tuple[StageCosts, ...]:
        """All stages in the order of the model."""
        return tuple(sorted((s for rank in self.ranks for s in rank.stages), key=lambda found: found.stage))

    @property
    def alike(self) -> int:
        """Devices of a node that do what one device of a pipeline rank does."""
        return max(1, min(self.devices // len(self.ranks), self.host.devices))

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def plans(self) -> Sequence[Plan]:
        return [rank.plan for rank in self.ranks]
