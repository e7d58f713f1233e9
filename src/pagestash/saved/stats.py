"""Where saved tensors wait, in numbers: by home, by region, and in the pool's tiers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagestash.kernels.gemm.products import described
from pagestash.pages.telemetry import PoolStats
from pagestash.policy import HOMES, HomeName
from pagestash.saved.home import Home, HomeStats
from pagestash.saved.offload.moving import Offload
from pagestash.saved.received_rows import ExpectedRowsStats
from pagestash.saved.stash import Stash
from pagestash.sizes import format_bytes

OUTSIDE = "(outside all regions)"


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

    groups: int = 0
    bytes: int = 0
    peak: int = 0


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
    no_page: NoPageStats = NoPageStats()
    expected_rows: ExpectedRowsStats | None = None
    """Of layers with `expected_rows="auto"`, once there is a number."""
    products: str = ""
    """Who multiplies experts' rows in bf16 on this device, and why not another."""

    def __str__(self) -> str:
        lines = [f"{'':<10}{'now':>12}{'peak':>12}"]
        lines += [_line(home, held.bytes, held.peak) for home, held in self.homes.items()]
        pool, offload, left = self.pool, self.offload, self.no_page
        if pool is not None:
            for name, tier in (("pool", pool.device), ("host pages", pool.host)):
                if tier.pages:
                    used = _line(name, tier.in_use_bytes, tier.peak_bytes)
                    lines.append(f"{used}  of {format_bytes(tier.bytes)}")
            lines.append(f"overflow: {'yes' if pool.overflow else 'no'}")
            if pool.given_up_groups:
                lines.append(f"found no page, and were recomputed: {pool.given_up_groups} groups")
        if left.groups:
            lines.append(f"found no page, and were kept: {left.groups} groups, {format_bytes(left.peak)}")
        if offload is not None:
            pinned, limit = format_bytes(offload.host_bytes), format_bytes(offload.limit)
            lines.append(f"pinned for offload: {pinned} of {limit}")
            if offload.refused_peak:
                lines.append(f"found no pinned memory, and were kept: {format_bytes(offload.refused_peak)}")
        return "\n".join(lines)

    @property
    def overflow(self) -> bool:
        return self.pool is not None and self.pool.overflow

    @property
    def spilled_bytes(self) -> int:
        return 0 if self.pool is None else self.pool.spilled_bytes


def _line(name: str, now: int, peak: int) -> str:
    return f"{name:<10}{format_bytes(now):>12}{format_bytes(peak):>12}"


def collect(
    homes: Sequence[Home], stash: Stash, offload: Offload, device: torch.device | None
) -> KeeperStats:
    """What the homes hold. Waits for the device."""
    by_region: dict[str, HomeStats] = {}
    for home in homes:
        for name, each in home.regions().items():
            # Peaks of several homes need not have been at one time.
            known = by_region.get(name or OUTSIDE, HomeStats(0, 0))
            by_region[name or OUTSIDE] = HomeStats(known.bytes + each.bytes, known.peak + each.peak)
    pool, left = stash.pool, stash.no_page
    return KeeperStats(
        homes={home.name: home.stats() for home in sorted(homes, key=lambda home: HOMES.index(home.name))},
        regions=by_region,
        pool=None if pool is None else pool.stats(),
        offload=None if offload.plan is None else _offload_stats(offload),
        no_page=NoPageStats()
        if left is None
        else NoPageStats(left.groups, left.tally.bytes, left.tally.peak),
        products="" if device is None else described(device),
    )


def _offload_stats(offload: Offload) -> OffloadStats:
    slabs, refused = offload.slabs, offload.refused
    return OffloadStats(slabs.size, slabs.limit, refused.bytes, refused.peak)
