"""Zero the rows of a buffer that are not valid; the valid ones are not touched."""

import torch

from pagestash.kernels.backend import Backend, launch, multiprocessors, tl, triton
from pagestash.kernels.pages.chunks import fill_chunk

CHUNK = 16384
WARPS = 16


def zero_tail(buffer: torch.Tensor, rows: torch.Tensor, backend: Backend) -> None:
    """Zero `buffer` (uint8 [capacity, row bytes], contiguous) from row `rows`, a device integer, on."""
    if buffer.numel() == 0:
        return
    if backend == "torch":
        zero_tail_reference(buffer, rows)
        return
    work = -(-buffer.numel() // CHUNK)
    launch(
        _zero_tail_kernel,
        (max(1, min(work, 2 * multiprocessors(buffer.device))),),
        buffer.device,
        buffer,
        rows,
        buffer.shape[1],
        buffer.numel(),
        CHUNK=CHUNK,
        WIDE=buffer.data_ptr() % 16 == 0,
        num_warps=WARPS,
    )


# --- what: the torch reference ------------------------------------------------------------------------------


def zero_tail_reference(buffer: torch.Tensor, rows: torch.Tensor) -> None:
    past = torch.arange(buffer.shape[0], device=buffer.device) >= rows.view(())
    buffer.masked_fill_(past[:, None], 0)


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _zero_tail_kernel(buffer, rows, row_bytes, size, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    begin = tl.maximum(tl.load(rows).to(tl.int64), 0) * row_bytes
    # The first chunk that has bytes to zero; the ones before it cost nothing.
    chunk = begin // CHUNK + tl.program_id(0)
    while chunk * CHUNK < size:
        start = chunk * CHUNK
        fill_chunk(buffer + start, begin - start, tl.zeros((), tl.int64), size - start, CHUNK, WIDE)
        chunk += tl.num_programs(0)
