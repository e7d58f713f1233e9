"""Statistics of a pool."""

from dataclasses import dataclass

import torch

from pagestash.kernels.pages.layout import Counter, PoolMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier, in pages; `wanted` is the number that would have sufficed at the peak."""

    pages: int
    in_use: int
    peak: int
    wanted: int
    page_bytes: int

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def in_use_bytes(self) -> int:
        return self.in_use * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak * self.page_bytes

    @property
    def wanted_bytes(self) -> int:
        return self.wanted * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool at one moment, with its peaks since the last `reset`.

    `required` is the peak of pages wanted by groups that are not expendable. A pool of that size would not have
    overflowed, but may give up expendable groups (`given_up_groups`). `valid_bytes` counts stashed bytes before
    rounding up to pages, groups that did not fit included. `device.wanted` device pages would have held everything
    without host pages; with the present device pages, `host.wanted` host pages would have sufficed.
    """

    device: TierStats
    host: TierStats
    valid_bytes: int
    valid_bytes_peak: int
    spilled_bytes: int
    refused_groups: int
    required: int
    given_up_groups: int
    overflow: bool


def read_stats(memory: PoolMemory) -> PoolStats:
    """Read the counters; waits for the device."""
    # One copy, so that all numbers are of one moment.
    values = torch.cat([memory.state, memory.overflow.reshape(1).to(torch.int64)]).tolist()
    counter = {name: values[name] for name in Counter}
    device_pages, host_pages = memory.device_pages, memory.host_pages
    wanted = counter[Counter.WANTED_PEAK]
    return PoolStats(
        device=TierStats(
            pages=device_pages,
            in_use=device_pages - counter[Counter.DEVICE_FREE],
            peak=counter[Counter.DEVICE_PEAK],
            wanted=wanted,
            page_bytes=memory.page_bytes,
        ),
        host=TierStats(
            pages=host_pages,
            in_use=host_pages - counter[Counter.HOST_FREE],
            peak=counter[Counter.HOST_PEAK],
            wanted=max(0, wanted - device_pages),
            page_bytes=memory.page_bytes,
        ),
        valid_bytes=counter[Counter.BYTES],
        valid_bytes_peak=counter[Counter.BYTES_PEAK],
        spilled_bytes=counter[Counter.SPILLED] * memory.page_bytes,
        refused_groups=counter[Counter.REFUSED],
        required=counter[Counter.REQUIRED_PEAK],
        given_up_groups=counter[Counter.GIVEN_UP],
        overflow=values[-1] != 0,
    )
