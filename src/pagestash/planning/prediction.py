"""What a prediction takes and gives: rules by region; a step's time and memory; the sums of a part of a step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from pagestash.planning.lanes import SLOW_STEPS
from pagestash.planning.skew import PoolSize
from pagestash.policy import HomeName, Policy, PoolConfig, Rule
from pagestash.profiling.records import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step under a policy."""

    seconds: float
    """On a host that is as quick as measured."""
    slow_host_seconds: float
    """On one that takes longer for all that it does, and whose link is slower (`lanes.py`)."""
    slower_host: float
    """How many times as long that one takes."""
    device_seconds: float
    """What of it the device computes for."""
    launch_seconds: float
    """What of it the host takes to launch the step; 0 in a graph, and where the host computes."""
    recompute_seconds: float
    wait_seconds: float
    """How much longer it takes because compute waits for copies: nothing where the host takes longer still."""
    slow_wait_seconds: float
    """The same where host and link are slow."""
    waits: Sequence[tuple[int, float]]
    """The segment before which it waits, and for how long."""
    out_seconds: float
    back_seconds: float
    """How long the link is busy each way."""
    moved_bytes: int
    host_bytes: int
    """The most that is on the host at one time."""
    peak_bytes: int
    """The most device memory at one time, with `base`."""
    peak_at: int
    """The segment in which that is."""
    starts: Sequence[float]
    """When each segment begins."""
    memory: dict[str, Sequence[int]]
    """Device bytes in each segment: of each home, `base`, and `other`: workspace and gradients."""
    staying: frozenset[str]
    """Regions under an offload rule of which all groups stay on the device."""
    moving: frozenset[str]
    """Regions of which a group leaves."""
    leaving: frozenset[int]
    """Storages that leave the device; of a rank, by their numbers in its whole step."""
    held_bytes: dict[HomeName, int]
    """Saved bytes by their home: of `recompute` and `offload`, what is dropped or leaves."""
    pool: PoolSize

    @property
    def mean_seconds(self) -> float:
        """Over steps in which host and link are quick, and slow: what policies are compared by."""
        return (1 - SLOW_STEPS) * self.seconds + SLOW_STEPS * self.slow_host_seconds

    @property
    def is_waiting(self) -> bool:
        """Whether compute waits for copies, on a quick host or a slow one."""
        return self.wait_seconds > 0 or self.slow_wait_seconds > 0

    def longer(self, more: "Cost") -> float:
        """How much longer a step of a loop takes on average with this more, by sums.

        The host launches a step while the device runs the one before: it takes what the slower of both takes.
        """
        found = 0.0
        for slower, part in ((1.0, 1 - SLOW_STEPS), (self.slower_host, SLOW_STEPS)):
            device, host = self.device_seconds, slower * self.launch_seconds
            after = max(device + more.device_seconds, host + slower * more.launch_seconds)
            found += part * (after - max(device, host))
        return found

    def at_peak(self) -> dict[str, int]:
        """Device bytes by what holds them, where memory peaks."""
        return {name: sizes[self.peak_at] for name, sizes in self.memory.items()}


class Cost(NamedTuple):
    """What a policy takes of one part of a step, as sums; what matters most comes first."""

    kept_bytes: int
    """On the device at the end of forward."""
    moved_bytes: int
    """Over the link, each way."""
    seconds: float
    """Of replays and copies on the device, and what the step waits for the host on average."""
    recomputed_bytes: int
    """The most that one replay brings back."""
    device_seconds: float = 0.0
    """The same without what the step waits for the keeper's own work."""
    launch_seconds: float = 0.0
    """Of a host that is ahead of the device: it launches replays, and runs the keeper."""

    def minus(self, other: "Cost") -> "Cost":
        """How much more each sum is. (`recomputed_bytes` is no sum, and nobody reads it of a difference.)"""
        return Cost(*map(sub, self, other))


class RuleTable:
    """Rules by region, looked up once."""

    def __init__(self, rules: dict[str, Rule], pool: PoolConfig) -> None:
        self.rules, self.pool = rules, pool
        self.rule_for: Callable[[str], Rule | None] = rules.get

    @classmethod
    def of(cls, policy: Policy, regions: Iterable[Region]) -> "RuleTable":
        policy.refuse_bits("a prediction")
        found = ((region.name, policy.rule_for(region.name)) for region in regions if region.name)
        return cls({name: rule for name, rule in found if rule is not None}, policy.pool)
