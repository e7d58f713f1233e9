"""What tests compare with tells apart what it must."""

import math

import pytest
import torch
from support import error, same

from pagestash.kernels.moe.choose_experts import topk

X = torch.tensor([1.0, math.nan, 0.0])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (X, X.clone()),
        (X, torch.tensor([1.0, 7.0, math.nan, 7.0, 0.0])[::2]),
        ([X, None, 3], (X, None, 3)),
        ({"a": [X]}, {"a": [X.clone()]}),
        (iter([X]), [X]),
        (torch.tensor(2 - 1j).conj(), torch.tensor(2 + 1j)),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ],
)
def test_what_has_the_same_bits_is_the_same(left, right):
    assert same(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (X, X.double()),
        (X, X[:, None]),
        (X, X[:2]),
        (X, torch.tensor([1.0, math.nan, -0.0])),
        (X, torch.tensor([1.0, 2.0, 0.0])),
        (X.view(torch.int32), X.view(torch.int32) + torch.tensor([0, 1, 0], dtype=torch.int32)),
        (X, (X.view(torch.int32) + torch.tensor([0, 1, 0], dtype=torch.int32)).view(torch.float32)),
        (torch.zeros(0, 3), torch.zeros(0, 4)),
        (torch.eye(3).to_sparse(), torch.eye(3)),
        ([X], [X, X]),
        ([X, X], [X]),
        ([X], X),
        ([None], [X]),
        ({"a": X}, {"b": X}),
        ([1], [True]),
    ],
)
def test_any_other_bit_shape_type_or_length_is_not(left, right):
    assert not same(left, right)


def test_error_is_relative_and_fails_where_it_must():
    assert error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.4 / 5)
    assert error(torch.zeros(3), torch.zeros(3)) == 0
    assert error(torch.full((3,), 1e-20), torch.zeros(3)) > 1
    assert not error(X, torch.ones(3)) < math.inf
    with pytest.raises(AssertionError):
        error(torch.ones(3, 1), torch.ones(3))


@pytest.mark.usefixtures("interpreted_kernels")
def test_a_launch_of_interpreted_kernels_leaves_the_language_of_triton_as_it_was():
    tl = pytest.importorskip("triton.language")
    x = torch.tensor([[1.0, 3.0, 2.0]])
    before = {**vars(tl)}, {**vars(tl.math)}
    for _ in range(2):  # the functions are looked for, and remembered
        assert topk(x, 2, backend="triton").tolist() == [[1, 2]]
        assert ({**vars(tl)}, {**vars(tl.math)}) == before
