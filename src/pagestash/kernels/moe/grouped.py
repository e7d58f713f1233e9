"""Products of expert-sorted rows with each expert's matrix."""

import torch
import torch.nn.functional as F


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`a[rows of e] @ b[e]` for `b` [E, k, n], or `a[:, rows of e] @ b[rows of e]` for `b` [rows, n].

    `offsets` (int32, on the device) says where each expert's rows end. Rows after the last are not read, and
    in the result they are undefined. In bf16 on a GPU nothing waits for the host; elsewhere it reads them.
    """
    if b.ndim == 2 and not b.shape[0]:  # no token at all: nothing to launch, and no address to give
        return a.new_zeros(offsets.numel(), a.shape[0], b.shape[1])
    if a.is_cuda and a.dtype == torch.bfloat16:
        return F.grouped_mm(a, b, offs=offsets)
    return grouped_mm_reference(a, b, offsets)


def grouped_mm_reference(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
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
