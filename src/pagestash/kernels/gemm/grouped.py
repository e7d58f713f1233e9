"""The products by torch: `F.grouped_mm`, and its reference where there is none.

`bounds` [E + 1] (int32, on the device) says where each expert's rows begin, and last where all end. Rows after that
are not read, and in the result they are undefined.
"""

import torch
import torch.nn.functional as F

from pagestash.kernels.gemm.rows import Rows, in_memory


class TorchProducts:
    """What every device has; see `Products`. Rows that are to be gathered are permuted first, once."""

    name = "torch"

    def gates(self, rows: int, up_EHD: torch.Tensor) -> bool:
        """There is no product with the activation in its epilogue."""
        return False

    def up_gated(
        self, x: Rows, up_EHD: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def forward(self, rows: Rows, weight_EOI: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return grouped_mm(in_memory(rows), weight_EOI.transpose(-2, -1), bounds)

    def input_gradient(
        self, dy: Rows, weight_EOI: torch.Tensor, bounds: torch.Tensor, *, paired: bool = False
    ) -> torch.Tensor:
        assert not paired
        return grouped_mm(in_memory(dy), weight_EOI, bounds)

    def weight_gradient(
        self, dy: Rows, x: Rows, bounds: torch.Tensor, *, paired: bool = False, turned: bool = False
    ) -> torch.Tensor:
        assert not paired
        if turned:
            return grouped_mm(in_memory(x).t(), in_memory(dy), bounds).transpose(1, 2)
        return grouped_mm(in_memory(dy).t(), in_memory(x), bounds)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """`a[rows of e] @ b[e]` for `b` [E, k, n], or `a[:, rows of e] @ b[rows of e]` for `b` [rows, n].

    In bf16 on a GPU nothing waits for the host; elsewhere it reads the bounds.
    """
    if b.ndim == 2 and not b.shape[0]:  # no token at all: nothing to launch, and no address to give
        return a.new_zeros(bounds.numel() - 1, a.shape[0], b.shape[1])
    if b.ndim == 3 and not a.shape[0]:
        return a.new_empty(0, b.shape[2])
    if a.is_cuda and a.dtype == torch.bfloat16:
        return F.grouped_mm(a, b, offs=bounds[1:])
    return grouped_mm_reference(a, b, bounds)


def grouped_mm_reference(a: torch.Tensor, b: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    starts, ends = bounds[:-1].tolist(), bounds[1:].tolist()
    if b.ndim == 3:
        out = a.new_empty(a.shape[0], b.shape[2])
        for expert, (start, end) in enumerate(zip(starts, ends)):
            torch.mm(a[start:end], b[expert], out=out[start:end])
        return out
    out = a.new_zeros(len(ends), a.shape[0], b.shape[1])
    for expert, (start, end) in enumerate(zip(starts, ends)):
        if end > start:
            torch.mm(a[:, start:end], b[start:end], out=out[expert])
    return out
