"""How many rows a layer should expect, from the rows that layers received: `expected_rows="auto"`.

For a number S of expected rows, and a step of which it is recorded what waits from when to when,

    head(S)  =  bytes of S rows of everything that waits, and of gradients that backwards have left, at their peak
    pool(S)  =  pages of the rows beyond S at their peak, at the quantile `1 - overflow` over steps

Heads are ordinary memory: the gradients of a layer take the place of its head. A row beyond S is copied to a page
and back. So of all S whose head + pool is at most `SLACK` more than the smallest, the largest is chosen.

Pages of a step are taken as log-normal, as received rows are. Their mean and variance are those of the last
`WINDOW` steps. With fewer than `ENOUGH` steps the variance is that of as many independent layers as wait at once,
and `overflow` is `FIRST_OVERFLOW`.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch

from pagestash.policy import OVERFLOW, PoolConfig
from pagestash.saved.received_rows import SLOTS, ExpectedRowsStats, ReceivedRows, RowsRecording
from pagestash.saved.stash import Stash
from pagestash.sizes import format_bytes

log = logging.getLogger("pagestash")

SLACK = 0.2
WINDOW = 64
ENOUGH = 8
FIRST_OVERFLOW = 0.05
"""The probability of a rerun until there are as many: layers may depend on each other more than is assumed."""
CANDIDATES = 64
AT_ONCE = 1 << 20
"""Elements of the tensors that all candidates are tried with."""
GAIN = 0.05
"""How much smaller head + pool must become for another number to be worth a new graph."""
TOO_OFTEN = 10
"""How many times the stated probability of a rerun is a reason for another number."""


class Choice(NamedTuple):
    """A number of expected rows, and what it takes."""

    rows: int
    head_bytes: int
    pages: int
    held_bytes: int
    """Head and pool, at their peak."""


class StepRows:
    """What waits in a recorded step, for rows [T, W] received in T steps by each of the W that wait.

    C candidates for the number of expected rows, V events.
    """

    def __init__(self, step: RowsRecording, rows_TW: torch.Tensor, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._rows_TW = rows_TW
        self._at_V = torch.tensor([index for index, _ in step.events])
        self._sign_V = torch.tensor([sign for _, sign in step.events])
        tensors = max(len(each.row_bytes) for each in step.waiting)
        padded = [each.row_bytes + (0,) * (tensors - len(each.row_bytes)) for each in step.waiting]
        self._bytes_BW = torch.tensor(padded, dtype=torch.int64).t()
        # After each event: bytes of heads for each expected row, and of gradients.
        heads_W = torch.tensor([each.head_bytes for each in step.waiting])
        self._heads_V = (heads_W[self._at_V] * self._sign_V).cumsum(0)
        self._gradients_V = torch.tensor(_gradients(step)).cumsum(0)
        in_pages_W = self._bytes_BW.sum(0) > 0
        self._at_once = int((self._sign_V * in_pages_W[self._at_V]).cumsum(0).max())
        self.steps = rows_TW.shape[0]

    def choose(self, overflow: float, slack: float = SLACK) -> Choice:
        """The most rows with which head + pool is at most `slack` more than the smallest."""
        numbers = self._candidates()
        found = [self.choice(rows, pages) for rows, pages in zip(numbers, self.needs(numbers, overflow))]
        least = min(choice.held_bytes for choice in found)
        return next(choice for choice in reversed(found) if choice.held_bytes <= (1 + slack) * least)

    def least_for(self, pages: int, overflow: float) -> Choice:
        """The fewest rows with which so many pages suffice."""
        numbers = self._candidates()
        enough = (rows for rows, need in zip(numbers, self.needs(numbers, overflow)) if need <= pages)
        return self.choice(next(enough, numbers[-1]), pages)

    def choice(self, rows: int, pages: int) -> Choice:
        heads_V = self._heads_V * rows
        held = int((heads_V + self._gradients_V).max()) + pages * self.page_bytes
        return Choice(rows, int(heads_V.max()), pages, held)

    def needs(self, numbers: Sequence[int], overflow: float) -> list[int]:
        """For each number of rows, pages that a step exceeds with that probability, and no step so far has."""
        deviations = NormalDist().inv_cdf(1 - overflow)
        return [
            max(most, math.ceil(mean * math.exp(deviations * sigma - sigma**2 / 2)))
            for mean, sigma, most in self._spreads(numbers)
        ]

    def overflows(self, rows: int, pages: int) -> float:
        """The probability that a step needs more pages."""
        ((mean, sigma, most),) = self._spreads([rows])
        if not sigma:
            return float(most > pages)
        return 1 - NormalDist().cdf((math.log(max(pages, 1) / mean) + sigma**2 / 2) / sigma)

    def most_pages(self, rows: int) -> int:
        """The most that any step has needed."""
        return self._spreads([rows])[0][2]

    def _candidates(self) -> list[int]:
        most = int(self._rows_TW.max())
        return sorted({most * part // CANDIDATES for part in range(CANDIDATES + 1)})

    def _spreads(self, numbers: Sequence[int]) -> list[tuple[float, float, int]]:
        """Of the pages of a step: mean, deviation of the logarithm, and the most."""
        together = max(1, AT_ONCE // (self._rows_TW.shape[0] * self._at_V.numel()))
        parts = [numbers[at : at + together] for at in range(0, len(numbers), together)]
        return [spread for part in parts for spread in self._spreads_of(part)]

    def _spreads_of(self, numbers: Sequence[int]) -> Iterator[tuple[float, float, int]]:
        beyond_CTW = (self._rows_TW - torch.tensor(numbers)[:, None, None]).clamp(min=0)
        pages_CTW = sum(-(-beyond_CTW * bytes_W // self.page_bytes) for bytes_W in self._bytes_BW)
        peaks_CT = (pages_CTW[:, :, self._at_V] * self._sign_V).cumsum(2).amax(2)
        means = peaks_CT.double().mean(1).tolist()
        if self.steps >= ENOUGH:
            variances = (peaks_CT.double().var(1) * (1 + 1 / self.steps)).tolist()
        else:
            variances = (self._at_once * pages_CTW.double().flatten(1).var(1, correction=0)).tolist()
        for mean, variance, most in zip(means, variances, peaks_CT.amax(1).tolist()):
            yield mean, math.sqrt(math.log1p(variance / mean**2)) if mean else 0.0, most


def _gradients(step: RowsRecording) -> list[int]:
    """Bytes of gradients that each event leaves: the first backward of each layer."""
    seen: set[int] = set()
    found = []
    for index, sign in step.events:
        layer = step.waiting[index].layer
        first = sign < 0 and id(layer) not in seen
        if first:
            seen.add(id(layer))
        found.append(step.waiting[index].gradient_bytes if first else 0)
    return found


@dataclass(slots=True)
class _Reading:
    """Logs on their way to the host."""

    logs: torch.Tensor
    arrived: torch.cuda.Event | None

    def take(self) -> list[list[int]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.logs.tolist()


class AutoRows:
    """A keeper's choice of expected rows for its layers: the first when the pool is made, others as rows drift.

    Every layer gets the same number. A change takes effect between steps; a captured graph must be captured again.
    """

    def __init__(
        self,
        layers: Sequence[ReceivedRows],
        stash: Stash,
        pool: PoolConfig,
        *,
        leave: bool = False,
        overflow: float = OVERFLOW,
    ) -> None:
        self.leave = leave
        self._layers = layers
        self._stash = stash
        self._page_bytes = pool.page_bytes
        self._headroom = pool.headroom
        self._overflow = overflow
        self._recording: RowsRecording | None = None
        self._step: RowsRecording | None = None
        self._fixed = 0
        """Pages that are not for rows of the layers."""
        self._given = pool.device_bytes is not None
        """Whether the policy gives the pool's size, which stays."""
        self._now: Choice | None = None
        self._next: Choice | None = None
        self._changes = 0
        self._reading: _Reading | None = None

    # --- the first steps ---

    def begin(self) -> None:
        """A step begins: record what waits in it, unless that is known."""
        if self._stash.pool is None and self._now is not None:
            self.forget()  # it is measured again, on another device
        if self._step is None:
            self._recording = RowsRecording()
            for layer in self._layers:
                layer.recording = self._recording

    def end(self, *, failed: bool) -> None:
        """The step is over."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        for layer in self._layers:
            layer.recording = None
        if not failed and any(each.row_bytes for each in recording.waiting):
            self._step = recording

    def forget(self) -> None:
        """The layers expect no rows any more."""
        self._step = self._now = self._next = self._reading = None
        for layer in self._layers:
            layer.expected = 0

    @property
    def chosen(self) -> bool:
        """Whether there is a number."""
        return self._now is not None

    def first(self, pages: int) -> int:
        """Choose the first number, for a pool of `pages`; returns how many it should have.

        `pages` is what was measured without expected rows, times the headroom. A size that the policy gives stays:
        then the number is the least with which it suffices.
        """
        self.read()
        found = self._seen()
        if found is None:
            return pages
        if not self._given:
            self._fixed = max(0, pages - math.ceil(found.most_pages(0) * self._headroom))
        best = self._best(found, pages)
        self._set(best)
        return pages if self._given else max(1, self._fixed + best.pages)

    # --- later ---

    def read(self) -> None:
        """Start to copy the logs to the host."""
        logs = [
            torch.zeros(1 + SLOTS, dtype=torch.int32) if each.log is None else each.log
            for each in self._layers
        ]
        device = next((each.device for each in logs if each.is_cuda), None)
        if device is None:
            self._reading = _Reading(torch.stack(logs), None)
            return
        stacked = torch.stack([each.to(device, non_blocking=True) for each in logs])
        here = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        here.copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._reading = _Reading(here, arrived)

    def decide(self) -> bool:
        """Whether rows have drifted so far from what was chosen that another number is better; see `adopt`."""
        found, pool = self._seen(), self._stash.pool
        if found is None or pool is None or self._now is None or self._stash.live:
            return False
        pages = max(0, pool.device_pages - self._fixed)
        now = found.choice(self._now.rows, pages)
        best = self._best(found, pool.device_pages)
        overflows = found.overflows(now.rows, pages) > TOO_OFTEN * self._overflow
        worse = best.held_bytes > now.held_bytes and not overflows
        if best.rows == now.rows or worse or not (overflows or best.held_bytes < (1 - GAIN) * now.held_bytes):
            return False
        log.info(
            "by the last %d steps, expected_rows becomes %d instead of %d, and head plus pool %s instead of %s",
            found.steps,
            best.rows,
            now.rows,
            format_bytes(best.head_bytes + best.pages * self._page_bytes),
            format_bytes(now.head_bytes + pages * self._page_bytes),
        )
        self._next = best
        return True

    def adopt(self) -> None:
        """Let what was decided take effect. Nothing may be stashed, and no captured graph may run after this."""
        choice, self._next = self._next, None
        pool = self._stash.pool
        if choice is None or pool is None:
            return
        if not self._given:
            before = pool.device_pages
            pool.resize(1)
            if pool.device.type == "cuda":
                torch.cuda.empty_cache()  # else the new slab would be cut out of the old one's memory
            try:
                pool.resize(max(1, self._fixed + choice.pages))
            except RuntimeError:
                log.warning("there is no memory for the pool of the new expected_rows: the old number stays")
                pool.resize(before)
                return
        self._changes += 1
        self._set(choice)

    def stats(self) -> ExpectedRowsStats | None:
        """None before the first number."""
        now = self._now
        if now is None:
            return None
        return ExpectedRowsStats(
            now.rows, now.head_bytes, now.pages * self._page_bytes, self._overflow, self._changes
        )

    def _best(self, found: StepRows, pool_pages: int) -> Choice:
        if self._given:
            return found.least_for(int(pool_pages / self._headroom), self._rate(found))
        return found.choose(self._rate(found))

    def _rate(self, found: StepRows) -> float:
        return self._overflow if found.steps >= ENOUGH else max(self._overflow, FIRST_OVERFLOW)

    def _set(self, choice: Choice) -> None:
        self._now = choice
        for layer in self._layers:
            layer.expected = choice.rows

    def _seen(self) -> StepRows | None:
        """The rows of the last steps, from the logs that were read; None if there are none."""
        reading, self._reading = self._reading, None
        step = self._step
        if reading is None or step is None:
            return None
        logs = dict(zip(map(id, self._layers), reading.take(), strict=True))
        calls = Counter(id(each.layer) for each in step.waiting)
        steps = min(WINDOW, *(min(logs[key][0], SLOTS) // count for key, count in calls.items()))
        if not steps:
            return None
        rows_TW = []
        for back in range(steps, 0, -1):
            row = []
            for each in step.waiting:
                counted = logs[id(each.layer)]
                at = counted[0] - back * calls[id(each.layer)] + each.call
                row.append(counted[1 + at % SLOTS])
            rows_TW.append(row)
        return StepRows(step, torch.tensor(rows_TW, dtype=torch.int64), self._page_bytes)
