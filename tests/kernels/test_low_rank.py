"""Products of a small inner dimension added to rows: against float64, over garbage, in any layout."""

import pytest
import torch

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe.low_rank import add_product_

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]
ENDS = [[0, 0, 0], [0, 5, 5], [3, 3, 260], [128, 128, 129], [127, 256, 300]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("rank", "columns"), [(16, 40), (5, 150), (80, 130)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_added_to_the_rows_of_their_experts(backend, ends, rank, columns, turned):
    torch.manual_seed(0)
    out, left = torch.randn(300, columns), torch.randn(300, rank)
    right = torch.randn(3, columns, rank).transpose(1, 2) if turned else torch.randn(3, rank, columns)
    left[ends[-1] :] = out[ends[-1] :] = torch.nan
    wanted = out.double()
    for expert, (start, end) in enumerate(zip([0, *ends], ends)):
        wanted[start:end] += left[start:end].double() @ right[expert].double()
    got = add_product_(out, left, right, torch.tensor(ends, dtype=torch.int32), backend=backend)
    assert got is out
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_is_rounded_once(backend):
    """1 + 2**-8 is no bfloat16, but 1 + 2**-8 + 2**-8 is."""
    out = torch.ones(3, 16).bfloat16()
    left, right = torch.ones(3, 2).bfloat16(), torch.full((1, 2, 16), 2.0**-8).bfloat16()
    add_product_(out, left, right, torch.tensor([3], dtype=torch.int32), backend=backend)
    assert (out == 1 + 2.0**-7).all()


def test_shapes_that_do_not_fit_are_named():
    ends = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected \[R, m\]"):
        add_product_(torch.zeros(5, 3), torch.zeros(5, 4), torch.zeros(2, 5, 3), ends)
    with pytest.raises(ValueError, match="contiguous"):
        add_product_(torch.zeros(5, 3), torch.zeros(4, 5).t(), torch.zeros(2, 4, 3), ends)
