"""Where each expert's rows end, for a part of them: one launch where torch would need several.

In a graph a launch costs some 4 µs however little it does, and a layer of 3 ms has dozens.
"""

import torch

from pagestash.kernels.backend import choose, launch, power_of_two, tl, triton
from pagestash.kernels.pages.layout import K_GRANTED, K_HEADER, K_STATUS
from pagestash.kernels.pages.paged import Pages


def cut_ends(
    offsets: torch.Tensor, expected: int, *, log: torch.Tensor | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends among the first `expected` rows, and those among the rows in excess, counted from there.

    `log`, int32 [1 + slots], gets the number of all rows in `log[1 + calls % slots]`; `log[0]` counts the calls.
    """
    out = torch.empty(2, offsets.numel(), dtype=offsets.dtype, device=offsets.device)
    slots = 0 if log is None else log.numel() - 1
    if choose(offsets.device, backend) == "torch":
        out[0] = offsets.clamp(max=expected)
        out[1] = (offsets - expected).clamp(min=0)
        if log is not None:
            log.scatter_(0, 1 + log[:1].to(torch.int64) % slots, offsets[-1:].to(torch.int32))
            log[:1] += 1
    else:
        launch(
            _cut_kernel,
            (1,),
            offsets.device,
            offsets,
            out,
            out if log is None else log,
            expected,
            offsets.numel(),
            BLOCK=power_of_two(offsets.numel()),
            SLOTS=slots,
        )
    early, late = out.unbind()
    return early, late


def missing_ends(offsets: torch.Tensor, pages: Pages, *, backend: str = "auto") -> torch.Tensor:
    """The ends of rows whose pages are missing: zeros where they were granted."""
    if choose(offsets.device, backend) == "torch":
        return torch.where(pages.granted, 0, offsets)
    out = torch.empty_like(offsets)
    launch(
        _missing_kernel,
        (1,),
        offsets.device,
        offsets,
        out,
        pages.book,
        pages.member,
        offsets.numel(),
        BLOCK=power_of_two(offsets.numel()),
    )
    return out


@triton.jit
def _cut_kernel(offsets, out, log, expected, count, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    end = tl.load(offsets + at, mask=at < count, other=0)
    tl.store(out + at, tl.minimum(end, expected), mask=at < count)
    tl.store(out + count + at, tl.maximum(end - expected, 0), mask=at < count)
    if SLOTS > 0:
        calls = tl.load(log)
        tl.store(log + 1 + calls % SLOTS, tl.max(end, 0))
        tl.store(log, calls + 1)


@triton.jit
def _missing_kernel(offsets, out, book, member, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    end = tl.load(offsets + at, mask=at < count, other=0)
    granted = tl.load(book + member * K_HEADER + K_STATUS) == K_GRANTED
    tl.store(out + at, tl.where(granted, 0, end), mask=at < count)
