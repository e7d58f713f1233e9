"""Digests tell any two tensors apart that differ in a bit."""

import pytest
import torch

from pagestash.verifying import compare
from pagestash.verifying.compare import Digests
from pagestash.verifying.runs import Key

KEY = Key(1, "gradient", "w")


def digest(value):
    found = Digests()
    found(KEY, value)
    return found.of[KEY]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_anywhere_in_any_dtype_changes_the_digest(dtype, monkeypatch):
    monkeypatch.setattr(compare, "CHUNK", 8)
    tensor = torch.randint(0, 2, (21,)).to(dtype)
    wanted = digest(tensor)
    assert digest(tensor.clone()) == wanted
    seen = [wanted]
    raw = tensor.view(torch.uint8)
    for index in range(len(raw)):
        raw[index] ^= 1
        seen.append(digest(tensor))
        raw[index] ^= 1
    assert len({str(each) for each in seen}) == len(raw) + 1


def test_layout_does_not_count_and_order_shape_and_dtype_do():
    tensor = torch.randn(4, 6)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(tensor.roll(1)) != digest(tensor)
    assert digest(tensor.view(6, 4)) != digest(tensor)
    assert digest(tensor.view(torch.int32)) != digest(tensor)
    assert digest(torch.zeros(0)) == digest(torch.zeros(0)) != digest(torch.zeros(1))


def test_sparse_tensors_are_compared_by_their_parts():
    make = torch.sparse_coo_tensor
    one = make([[0, 2]], [1.0, 2.0], (3,))
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(make([[0, 1]], [1.0, 2.0], (3,)))
    assert digest(one) != digest(make([[0, 2]], [1.0, 3.0], (3,)))


def test_a_distance_counts_elements_and_keeps_nan():
    left, right = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 5.0])
    assert compare._distance([left], [right]) == compare.Distance(2, 3, 1.0, 5.0)
    odd = torch.tensor([torch.nan, 1.0])
    assert compare._distance([odd], [odd]).count == 0
    found = compare._distance([odd], [torch.ones(2)])
    assert found.count == 1
    assert found.order == torch.inf
