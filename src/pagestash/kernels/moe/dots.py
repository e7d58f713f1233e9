"""What grouped products in Triton have in common: which backend multiplies, an expert's rows, a tile of them."""

from collections.abc import Iterator

import torch

from pagestash.kernels.backend import Backend, choose, interpreted, tl, triton


def dot_backend(like: torch.Tensor, backend: str) -> Backend:
    """The backend for products of the dtype of `like`, whose sums are in float32 (float64 for that)."""
    # The interpreter's dot takes the bits of a bfloat16 for an integer.
    unfit = like.dtype == torch.float64 or (interpreted() and like.dtype == torch.bfloat16)
    return "torch" if unfit else choose(like.device, backend)


def rows_of_experts(ends_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and which they are; waits for the device."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = max(start, end)


@triton.jit
def load_tile(matrix, row, column, row_stride, column_stride, row_inside, column_inside):
    """The elements of `matrix` at rows × columns. Those that are not inside are zero: they may be garbage."""
    at = matrix + row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(at, mask=row_inside[:, None] & column_inside[None, :], other=0.0)
