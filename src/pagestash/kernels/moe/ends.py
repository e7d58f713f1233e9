"""Where each expert's rows begin and end, for a part of them: one launch where torch would need several.

In a graph a launch costs some 4 µs however little it does, and a layer of 3 ms has dozens.
"""

import torch

from pagestash.kernels.backend import cdiv, choose, launch, power_of_two, tl, triton
from pagestash.kernels.pages.layout import K_GRANTED, K_HEADER, K_STATUS
from pagestash.kernels.pages.paged import Pages


def cut_bounds(
    bounds: torch.Tensor, expected: int, *, log: torch.Tensor | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds among the first `expected` rows, and those among the rows in excess, counted from there.

    `log`, int32 [1 + slots], gets the number of all rows in `log[1 + calls % slots]`; `log[0]` counts the calls.
    """
    # Both begin at a multiple of 16 bytes, as products read them.
    apart = cdiv(bounds.numel(), 4) * 4
    out = torch.empty(2, apart, dtype=bounds.dtype, device=bounds.device)
    early, late = out.narrow(1, 0, bounds.numel()).unbind()
    slots = 0 if log is None else log.numel() - 1
    if choose(bounds.device, backend) == "torch":
        early[:] = bounds.clamp(max=expected)
        late[:] = (bounds - expected).clamp(min=0)
        if log is not None:
            log.scatter_(0, 1 + log[:1].to(torch.int64) % slots, bounds[-1:].to(torch.int32))
            log[:1] += 1
    else:
        launch(
            _cut_kernel,
            (1,),
            bounds.device,
            bounds,
            out,
            out if log is None else log,
            expected,
            bounds.numel(),
            apart,
            BLOCK=power_of_two(bounds.numel()),
            SLOTS=slots,
        )
    return early, late


def missing_bounds(bounds: torch.Tensor, pages: Pages, *, backend: str = "auto") -> torch.Tensor:
    """The bounds of rows whose pages are missing: zeros where they were granted."""
    if choose(bounds.device, backend) == "torch":
        return torch.where(pages.granted, 0, bounds)
    out = torch.empty_like(bounds)
    launch(
        _missing_kernel,
        (1,),
        bounds.device,
        bounds,
        out,
        pages.book,
        pages.member,
        bounds.numel(),
        BLOCK=power_of_two(bounds.numel()),
    )
    return out


@triton.jit
def _cut_kernel(bounds, out, log, expected, count, apart, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    end = tl.load(bounds + at, mask=at < count, other=0)
    tl.store(out + at, tl.minimum(end, expected), mask=at < count)
    tl.store(out + apart + at, tl.maximum(end - expected, 0), mask=at < count)
    if SLOTS > 0:
        calls = tl.load(log)
        tl.store(log + 1 + calls % SLOTS, tl.max(end, 0))
        tl.store(log, calls + 1)


@triton.jit
def _missing_kernel(bounds, out, book, member, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    end = tl.load(bounds + at, mask=at < count, other=0)
    granted = tl.load(book + member * K_HEADER + K_STATUS) == K_GRANTED
    tl.store(out + at, tl.where(granted, 0, end), mask=at < count)
