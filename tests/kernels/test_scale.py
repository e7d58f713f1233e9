"""A product that is rounded once."""

import pytest
import torch

from pagestash.kernels.loss.scale import scaled


@pytest.mark.parametrize("size", [0, 1, 4096, 10_001])
@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_values_are_scaled_and_rounded_once(backend, size, dtype, to):
    values, by = torch.randn(size, dtype=dtype), torch.tensor(1 / 3, dtype=torch.float32)
    got = scaled(values, by, to, backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.dtype == to
    wanted = (values.to(wide) * by.to(wide)).to(to)
    if backend == "triton" and to == torch.bfloat16:  # the interpreter cuts off instead of rounding
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(got, wanted)
