"""Products of rows added to matrices: against float64, over garbage, and nothing where there are no rows."""

import pytest
import torch

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe.accumulate import accumulate_

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]
ENDS = [[0, 0, 0], [0, 5, 5], [3, 3, 70], [65, 66, 66], [90, 90, 90]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("m", "n"), [(16, 40), (150, 130)])
def test_products_are_added_for_experts_that_have_rows(backend, ends, m, n):
    torch.manual_seed(0)
    a, b, out = torch.randn(90, m), torch.randn(90, n), torch.randn(3, m, n)
    a[ends[-1] :] = b[ends[-1] :] = torch.nan
    wanted = out.double()
    for expert, (start, end) in enumerate(zip([0, *ends], ends)):
        wanted[expert] += a[start:end].double().t() @ b[start:end].double()
    before = out.clone()
    got = accumulate_(out, a, b, torch.tensor(ends, dtype=torch.int32), backend=backend)
    assert got is out
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    for expert, (start, end) in enumerate(zip([0, *ends], ends)):
        if start == end:
            assert torch.equal(out[expert], before[expert])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_is_rounded_once(backend):
    """1 + 2**-8 is no bfloat16, but 1 + 2**-8 + 2**-8 is."""
    out = torch.ones(1, 16, 16).bfloat16()
    a, b = torch.ones(2, 16).bfloat16(), torch.full((2, 16), 2.0**-8).bfloat16()
    accumulate_(out, a, b, torch.tensor([2], dtype=torch.int32), backend=backend)
    assert (out == 1 + 2.0**-7).all()


def test_shapes_that_do_not_fit_are_named():
    ends = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected \[E, m, n\]"):
        accumulate_(torch.zeros(2, 3, 4), torch.zeros(5, 3), torch.zeros(6, 4), ends)
    with pytest.raises(ValueError, match="contiguous"):
        accumulate_(torch.zeros(2, 3, 4), torch.zeros(3, 5).t(), torch.zeros(5, 4), ends)
