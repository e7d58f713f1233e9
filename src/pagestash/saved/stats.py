"""Where saved tensors wait, in numbers: by home, by region, and in the pool's tiers."""

from dataclasses import dataclass

from pagestash.pages.telemetry import PoolStats
from pagestash.policy import HomeName
from pagestash.saved.homes import Tally
from pagestash.saved.measured import MeasuredOffload
from pagestash.saved.offload import Offload
from pagestash.saved.stash import MeasuredStash, Stash

OUTSIDE = "(outside all regions)"


@dataclass(frozen=True, slots=True)
class HomeStats:
    """Valid bytes that wait in a home now, and at the peak since the last `reset_peaks`.

    Of `recompute`: what was made again and has not been asked for yet. What it dropped is nowhere.
    """

    bytes: int
    peak: int


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Pinned memory of the `offload` home, and the bytes that found no room in it and stayed on the device."""

    host_bytes: int
    limit: int
    refused: int
    refused_peak: int


@dataclass(frozen=True, slots=True)
class NoPageStats:
    """Stashed groups that found no page and stayed where they were, since the last `reset_peaks`; their bytes."""

    groups: int
    bytes: int
    peak: int


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """Where saved tensors wait: by home, by region (whatever the home), and the pool's tiers.

    What no rule matches is in `regions["(outside all regions)"]`; `pool` is None before there is one, and so is
    `offload`. What an offload rule leaves on the device counts as kept, or as stashed where it has valid rows.
    What found no page counts as kept, and in `no_page`.
    """

    homes: dict[HomeName, HomeStats]
    regions: dict[str, HomeStats]
    pool: PoolStats | None
    offload: OffloadStats | None = None
    no_page: NoPageStats = NoPageStats(0, 0, 0)

    @property
    def overflow(self) -> bool:
        return self.pool is not None and self.pool.overflow

    @property
    def spilled_bytes(self) -> int:
        return 0 if self.pool is None else self.pool.spilled_bytes


def collect(
    keep: Tally, recompute: Tally, stash: Stash | MeasuredStash, offload: Offload | MeasuredOffload
) -> KeeperStats:
    """What the homes hold. Waits for the device."""
    pool = limits = None
    no_page = NoPageStats(0, 0, 0)
    homes: dict[HomeName, HomeStats] = {
        "keep": _totals(keep),
        "stash": HomeStats(0, 0),
        "offload": _totals(offload.tally),
        "recompute": _totals(recompute),
    }
    regions: dict[str, HomeStats] = {}
    for tally in (keep, offload.tally, recompute):
        for name, sizes in tally.by_region.items():
            _add(regions, name or OUTSIDE, *sizes)
    if isinstance(stash, MeasuredStash):
        homes["stash"] = _totals(stash.tally)
        for name, sizes in stash.tally.by_region.items():
            _add(regions, name, *sizes)
    else:
        stash.flush()
        counts = stash.pool.memory.accounts.tolist()
        measured = stash.measured.by_region
        for name in dict.fromkeys((*stash.accounts, *measured)):
            now, peak = counts[stash.accounts[name]] if name in stash.accounts else (0, 0)
            _add(regions, name, now, max(peak, measured.get(name, (0, 0))[1]))
        pool = stash.pool.stats()
        homes["stash"] = HomeStats(pool.valid_bytes, max(pool.valid_bytes_peak, stash.measured.peak))
        left = stash.no_page
        no_page = NoPageStats(left.groups, left.tally.bytes, left.tally.peak)
    if isinstance(offload, Offload):
        slabs, refused = offload.slabs, offload.refused
        limits = OffloadStats(slabs.size, slabs.limit, refused.bytes, refused.peak)
    return KeeperStats(homes, regions, pool, limits, no_page)


def _totals(tally: Tally) -> HomeStats:
    return HomeStats(tally.bytes, tally.peak)


def _add(regions: dict[str, HomeStats], name: str, now: int, peak: int) -> None:
    """Count a region's bytes in one more home; peaks of several homes need not have been at one time."""
    known = regions.get(name, HomeStats(0, 0))
    regions[name] = HomeStats(known.bytes + now, known.peak + peak)
