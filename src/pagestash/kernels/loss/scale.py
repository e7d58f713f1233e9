"""A tensor times a device scalar, rounded to another dtype as it is written.

In torch that is a product of the wider type first: for the gradient of a language model's head, a gigabyte more.
"""

import torch

from pagestash.kernels.backend import choose, launch, tl, triton

BLOCK = 4096
WARPS = 8


def scaled(values: torch.Tensor, by: torch.Tensor, dtype: torch.dtype, backend: str = "auto") -> torch.Tensor:
    """`values` (contiguous) times `by`, a floating scalar on its device, in `dtype`."""
    if not values.is_contiguous():
        raise ValueError(f"values of strides {values.stride()}: expected a contiguous tensor")
    if choose(values.device, backend) == "torch" or not values.numel():
        return scaled_reference(values, by, dtype)
    out = torch.empty_like(values, dtype=dtype)
    launch(
        _scaled_kernel,
        (-(-values.numel() // BLOCK),),
        values.device,
        values,
        by,
        out,
        values.numel(),
        WIDE=tl.float64 if torch.float64 in (values.dtype, by.dtype) else tl.float32,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


# --- what: the torch reference ------------------------------------------------------------------------------


def scaled_reference(values: torch.Tensor, by: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in (values.dtype, by.dtype) else torch.float32
    return (values.to(wide) * by.to(wide)).to(dtype)


# --- how: the Triton kernel ---------------------------------------------------------------------------------


@triton.jit
def _scaled_kernel(values, by, out, size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(values + place, mask=inside).to(WIDE) * tl.load(by).to(WIDE)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
