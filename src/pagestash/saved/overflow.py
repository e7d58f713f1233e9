"""An eager step whose pool is too small: groups that find no page stay where they are, or the step is refused."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pagestash.kernels.pages.layout import Counter
from pagestash.pages.pool import PagePool
from pagestash.policy import PoolConfig
from pagestash.saved.home import Keep, KeptStorage, Tally
from pagestash.saved.storage import Entry
from pagestash.sizes import format_bytes

log = logging.getLogger("pagestash")


class PoolOverflow(RuntimeError):
    """The pool had fewer free pages than a group needed: the gradients of this step are not valid."""


@dataclass(slots=True, eq=False)
class Unpaged:
    """The place of an entry that found no page: it stays where it is."""

    no_page: "NoPage"
    held: KeptStorage

    def get(self, entry: Entry) -> torch.Tensor:
        return self.held.get(entry)

    def restore_into(self, entry: Entry, buffer: torch.Tensor) -> None:
        """All of it: rows past the valid ones are copied, too."""
        assert entry.origin is not None
        entry.spoiled |= entry.origin._version != entry.version
        buffer.view(-1).copy_(self.get(entry))

    def drop(self, entry: Entry) -> None:
        self.no_page.forget(entry)
        self.held.drop(entry)


class NoPage:
    """Keeps stashed groups that found no page, and counts them."""

    def __init__(self, keep: Keep) -> None:
        self.tally = Tally()
        self.groups = 0
        """Since the last `reset_peaks`."""
        self._keep = keep
        self._pages: dict[Entry, int] = {}
        self._most = 0

    def put(self, group: Sequence[Entry], pages: Sequence[int]) -> None:
        """Keep a group; `pages` is what each entry would have taken."""
        self.groups += 1
        for entry, count in zip(group, pages, strict=True):
            entry.place = Unpaged(self, self._keep.stay(entry))
            self._pages[entry] = count
            self.tally.count(entry.region, entry.length)
        self._most = max(self._most, sum(list(self._pages.values())))

    def forget(self, entry: Entry) -> None:
        """Nothing can ask for the entry any more."""
        self.tally.count(entry.region, -entry.length)
        del self._pages[entry]

    def take_peak(self) -> int:
        """The most pages that kept groups would have taken at once, since the last call."""
        most, self._most = self._most, 0
        return most

    def reset_peak(self) -> None:
        self.tally.reset_peak()
        self.groups = 0


def grow(pool: PagePool, headroom: float, kept: int = 0) -> tuple[int, int]:
    """Grow the device tier to what was wanted, times the headroom; returns (pages wanted, pages had).

    `kept` pages were wanted by groups that never asked the device for them. Expendable groups are no reason to
    grow: the next run leaves room for the others.
    """
    if kept:
        pool.memory.state[Counter.REQUIRED_PEAK].add_(kept)
    stats = pool.stats()
    had = stats.device.pages + stats.host.pages
    wanted = stats.device.wanted + kept
    if stats.required > had:
        pool.grow(device_pages=math.ceil(wanted * headroom) - stats.host.pages)
    return wanted, had


def make_room(pool: PagePool, headroom: float, no_page: NoPage) -> None:
    """Grow the pool for what found no page in the last step. Without memory for that it keeps its size."""
    kept = no_page.take_peak()
    if not kept:
        return
    found_none = format_bytes(kept * pool.page_bytes)
    try:
        grow(pool, headroom, kept)
    except RuntimeError as error:
        log.warning("%s found no page and stayed; there is no memory to grow the pool: %s", found_none, error)
    else:
        size = format_bytes(pool.device_pages * pool.page_bytes)
        log.warning("%s found no page and stayed where it was; the pool is now %s", found_none, size)


class Agreement:
    """A vote of the ranks of a group, on the host.

    It has a group of its own: a rank that comes here because its step failed must not meet the others in a
    collective of their model's.
    """

    PATIENCE = timedelta(seconds=60)
    """How long a rank whose step failed waits for the others before it raises its own error."""

    def __init__(self, group: Any = None) -> None:
        self._of = group
        self._group: Any = None

    @property
    def needed(self) -> bool:
        """Whether there are other ranks."""
        if self._of is None and not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self._of) > 1

    def any(self, mine: bool, failed: Exception | None = None) -> bool:
        """Whether any rank votes yes. Every rank calls this once a step, also one whose step `failed`."""
        if not self.needed:
            return mine
        if self._group is None:
            ranks = dist.get_process_group_ranks(dist.group.WORLD if self._of is None else self._of)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        vote = torch.tensor(float(mine))
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        if failed is None:
            work.wait()
            return bool(vote)
        log.warning("this rank's step failed (%r); asking the others whether a pool was too small", failed)
        try:
            return work.wait(self.PATIENCE) and bool(vote)
        except RuntimeError:  # the others wait in another collective, for this rank
            return False


def refuse_if_overflowed(
    pool: PagePool | None, ranks: Agreement, config: PoolConfig, error: Exception | None = None
) -> None:
    """At the end of a step: raise `PoolOverflow`, not the `error` it led to, if groups came back as zeros."""
    keeps = config.on_overflow == "keep"
    # Reading the flag waits for the device. That is not needed if all groups were certain to fit.
    mine = pool is not None and (pool.room.unsure or not keeps) and bool(pool.overflow)
    overflowed = mine if keeps else ranks.any(mine, error)
    if pool is not None:
        pool.room.unsure = False
    if not overflowed:
        return
    where = "the pool of another rank was too small"
    if pool is not None and mine:
        wanted, had = grow(pool, config.headroom)
        pool.reset()
        where = f"the pool had {had} pages and {wanted} were wanted"
    raise PoolOverflow(
        f"{where}: the gradients of this step are not valid. Zero them and run the step again; the pool has grown "
        "to what was wanted."
    ) from error
