"""Reserving pages, as plainly as torch can say it: the specification of what `stash.py` does in a kernel."""

from collections.abc import Sequence

import torch

from pagestash.kernels.pages.layout import HEADER, HOST_BASE, Counter, Header, PoolMemory, Span, Status


def reserve_reference(
    memory: PoolMemory,
    spans: Sequence[Span],
    fixed_rows: Sequence[int],
    rows: torch.Tensor | None,
    book: torch.Tensor,
    account: int,
    *,
    expendable: bool = False,
) -> None:
    state = memory.state
    count = 0 if rows is None else int(rows.item())
    lengths = [
        span.row_bytes * (fixed if fixed >= 0 else min(max(count, 0), span.capacity))
        for span, fixed in zip(spans, fixed_rows)
    ]
    pages = [-(-length // memory.page_bytes) for length in lengths]
    wanted = sum(pages)
    on_device = min(wanted, int(state[Counter.DEVICE_FREE]))
    on_host = wanted - on_device
    granted = on_host <= int(state[Counter.HOST_FREE])
    if expendable:
        held_back = max(int(state[Counter.REQUIRED_PEAK]) - int(state[Counter.REQUIRED]), 0)
        granted = wanted <= int(state[Counter.DEVICE_FREE]) - held_back

    if granted:
        device_at = (torch.arange(on_device) + int(state[Counter.DEVICE_HEAD])) % max(memory.device_pages, 1)
        host_at = (torch.arange(on_host) + int(state[Counter.HOST_HEAD])) % max(memory.host_pages, 1)
        ids = torch.cat([memory.device_ring[device_at], memory.host_ring[host_at]]).to(torch.int64)
        state[Counter.DEVICE_HEAD] = (int(state[Counter.DEVICE_HEAD]) + on_device) % max(
            memory.device_pages, 1
        )
        state[Counter.HOST_HEAD] = (int(state[Counter.HOST_HEAD]) + on_host) % max(memory.host_pages, 1)
        state[Counter.DEVICE_FREE] -= on_device
        state[Counter.HOST_FREE] -= on_host
        state[Counter.SPILLED] += on_host
    elif expendable:
        state[Counter.GIVEN_UP] += 1
    else:
        memory.overflow.fill_(1.0)
        state[Counter.REFUSED] += 1
    first = 0
    for index, (span, length, count) in enumerate(zip(spans, lengths, pages)):
        header = book[index * HEADER : (index + 1) * HEADER]
        header[Header.PAGES] = count
        header[Header.BYTES] = length
        header[Header.STATUS] = Status.GRANTED if granted else Status.REFUSED
        header[Header.DEVICE_PAGES] = 0
        header[Header.REQUIRED] = 0 if expendable else count
        if granted:
            book[span.table : span.table + count] = ids[first : first + count]
            header[Header.DEVICE_PAGES] = int((ids[first : first + count] < HOST_BASE).sum())
        first += count
    state[Counter.WANTED] += wanted
    _raise_to(state, Counter.WANTED_PEAK, int(state[Counter.WANTED]))
    state[Counter.REQUIRED] += 0 if expendable else wanted
    _raise_to(state, Counter.REQUIRED_PEAK, int(state[Counter.REQUIRED]))
    _raise_to(state, Counter.DEVICE_PEAK, memory.device_pages - int(state[Counter.DEVICE_FREE]))
    _raise_to(state, Counter.HOST_PEAK, memory.host_pages - int(state[Counter.HOST_FREE]))
    own = memory.accounts[account]
    for values, now, peak in ((own, 0, 1), (state, int(Counter.BYTES), int(Counter.BYTES_PEAK))):
        values[now] += sum(lengths)
        _raise_to(values, peak, int(values[now]))


def _raise_to(values: torch.Tensor, index: int, value: int) -> None:
    values[index] = max(int(values[index]), value)
