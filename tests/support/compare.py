"""How results are compared: `same` for what is only moved or computed in the same order, `error` for the rest."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def same(left: Any, right: Any) -> bool:
    """Whether two trees of tensors are the same to the last bit.

    A tree is a tensor, a mapping, a list, tuple or iterator of trees, or any other value. Trees must have the same
    lengths and keys; tensors the same dtype, shape, device, layout and bits: NaN is the same as a NaN of the same
    bits, and 0.0 is not the same as -0.0. Other values are compared with `==`.
    """
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_tensor(left.detach(), right.detach())
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple | Iterator) and isinstance(right, list | tuple | Iterator):
        left, right = list(left), list(right)
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))
    return type(left) is type(right) and bool(left == right)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if _kind(left) != _kind(right):
        return False
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    return torch.equal(_bits(left), _bits(right))


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.device, tensor.layout


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error in the 2-norm, ‖got - wanted‖₂ / ‖wanted‖₂, in float64; NaN where either has one.

    Where `wanted` is zero, any other `got` has an error past 1e30 times its norm.
    """
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
