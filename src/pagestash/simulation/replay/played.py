"""What a replay leaves: every piece that ran, and the memory of every rank."""

from dataclasses import dataclass
from typing import NamedTuple

from pagestash.schedules.plan import Plan


class Span(NamedTuple):
    """A piece that ran. `kind` is a piece's kind, or `send`, `wait`, `out`, `back` or `optimizer`."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(slots=True)
class RankReplay:
    """What one rank did."""

    plan: Plan
    spans: list[Span]
    """By their starts."""
    memory: list[tuple[float, int]]
    """Device bytes from each moment on."""
    peak_bytes: int
    host_bytes: int
    """The most that is on the host at one time."""

    def seconds(self) -> dict[str, float]:
        """By kind of span."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.kind] = found.get(span.kind, 0.0) + span.end - span.start
        return found

    def busy(self) -> float:
        """Seconds in which compute or communication runs."""
        total = until = 0.0
        for span in self.spans:
            if span.kind not in ("send", "wait", "out", "back"):
                total += max(0.0, span.end - max(until, span.start))
                until = max(until, span.end)
        return total


@dataclass(slots=True)
class Replay:
    """One step of all ranks of a pipeline group."""

    seconds: float
    ranks: list[RankReplay]
    events: int

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)

    def bubble(self) -> float:
        """The part of all ranks' time in which neither compute nor communication runs."""
        busy = sum(rank.busy() for rank in self.ranks)
        return 1 - busy / (self.seconds * len(self.ranks)) if self.seconds else 0.0
