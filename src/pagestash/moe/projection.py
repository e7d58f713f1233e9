"""A projection of each expert, perhaps with a low-rank update (LoRA): `y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ`, grouped by expert.

The sum `W + s·B·A` is never formed: there is no copy of the weight, and none is kept for backward. The update saves
nothing else either: backward computes `x·Aᵀ`, [R, K], again, from the rows that it has for the gradient of `A`.

R rows in expert order, E experts, I columns in, O columns out, K the rank, padded to what a grouped product takes.

| | forward | backward |
| --- | --- | --- |
| inner | `x·Aᵀ` | again, for the gradient of `B`: `s·dyᵀ·inner` |
| dinner | | `dy·(s·B)`; the gradient of `A` is `dinnerᵀ·x` |
| the update | `y += inner·(s·B)ᵀ` | `dx += dinner·A` |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagestash.kernels.gemm.products import TORCH, Products, products_for
from pagestash.kernels.gemm.rows import Rows
from pagestash.kernels.moe.low_rank import add_product_

ALIGNED = 16
"""Ranks are padded to multiples of this: what torch's grouped product takes on every device."""

Read = Callable[[torch.Tensor], torch.Tensor]


class LowRank(NamedTuple):
    """A low-rank update of each expert's matrix, `scale · b @ a`: parameters, or views of them."""

    a_EKI: torch.Tensor
    b_EOK: torch.Tensor
    scale: float


class Weight(NamedTuple):
    """What a projection multiplies with, as its module has it."""

    stored: torch.Tensor
    """The weight [E, O, I], or what `read` makes that of."""
    bias_EO: torch.Tensor | None = None
    update: LowRank | None = None
    read: Read | None = None
    """Makes the weight of `stored`, a frozen tensor: in forward, and again in backward. (It is quantised, say.)"""

    def matrices(self) -> torch.Tensor:
        """The weight [E, O, I] itself."""
        return self.stored if self.read is None else self.read(self.stored)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The stored weight, the bias, and the factors of the update."""
        a_EKI, b_EOK, _ = self.update or (None, None, 1.0)
        return self.stored, self.bias_EO, a_EKI, b_EOK

    def form(self) -> "Form":
        """What it is besides its tensors."""
        return Form(1.0 if self.update is None else self.update.scale, self.read)


class Form(NamedTuple):
    """What a `Weight` is besides its tensors, which autograd hands from forward to backward."""

    scale: float = 1.0
    read: Read | None = None

    def projection(self, tensors: Sequence[torch.Tensor | None], like: torch.Tensor) -> "Projection":
        """Of what `Weight.tensors` gave."""
        stored, bias_EO, a_EKI, b_EOK = tensors
        assert stored is not None
        update = None if a_EKI is None or b_EOK is None else LowRank(a_EKI, b_EOK, self.scale)
        return Projection.of(Weight(stored, bias_EO, update, self.read), like)


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight [E, O, I] and the factors of its update, ready to multiply with.

    All are in the activations' dtype; `a_EKI` and `b_EOK` are contiguous and of padded rank, and `b_EOK` is times
    the scale; `update` has the factors as they were. It is made in forward, and again in backward: what autograd
    keeps is then the parameters themselves, and not copies of them that live until backward.

    `paired` is of rows whose columns stand in pairs though the weight's do not: see `Products`. The factors are
    multiplied by torch: ranks are too small for more to be gained.
    """

    products: Products
    weight_EOI: torch.Tensor
    bias_EO: torch.Tensor | None = None
    update: LowRank | None = None
    a_EKI: torch.Tensor | None = None
    b_EOK: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: Weight, like: torch.Tensor) -> "Projection":
        weight_EOI = weight.matrices().to(like.dtype)
        bias_EO = None if weight.bias_EO is None else weight.bias_EO.to(like.dtype)
        products = products_for(like, *weight_EOI.shape[1:])
        if weight.update is None:
            return cls(products, weight_EOI, bias_EO)
        a, b, scale = weight.update
        rank = a.shape[1]
        padded = -(-rank // ALIGNED) * ALIGNED
        if padded == rank:
            a_EKI, b_EOK = like.new_empty(a.shape), like.new_empty(b.shape)
            torch.mul(b, scale, out=b_EOK)
            a_EKI.copy_(a)
        else:
            a_EKI, b_EOK = (
                like.new_zeros(a.shape[0], padded, a.shape[2]),
                like.new_zeros(*b.shape[:2], padded),
            )
            a_EKI[:, :rank].copy_(a)
            torch.mul(b, scale, out=b_EOK[..., :rank])
        return cls(products, weight_EOI, bias_EO, weight.update, a_EKI, b_EOK)

    def forward(self, x: Rows, bounds: torch.Tensor) -> torch.Tensor:
        y_RO = self.products.forward(x, self.weight_EOI, bounds)
        if self.a_EKI is not None and self.b_EOK is not None:
            inner_RK = TORCH.forward(x, self.a_EKI, bounds)
            add_product_(y_RO, inner_RK, self.b_EOK.transpose(-2, -1), bounds[1:])
        return y_RO

    def inner_gradient(self, dy: Rows, bounds: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the inner rows [R, K]; None without an update."""
        return None if self.b_EOK is None else TORCH.input_gradient(dy, self.b_EOK, bounds)

    def input_gradient(
        self, dy: Rows, dinner_RK: torch.Tensor | None, bounds: torch.Tensor, *, paired: bool = False
    ) -> torch.Tensor:
        dx_RI = self.products.input_gradient(dy, self.weight_EOI, bounds, paired=paired)
        if self.a_EKI is not None and dinner_RK is not None:
            add_product_(dx_RI, dinner_RK, self.a_EKI, bounds[1:])
        return dx_RI

    def gradient(self, dy: Rows, x: Rows, bounds: torch.Tensor, *, paired: bool = False) -> torch.Tensor:
        """The gradient of the weight, stored as the weight is."""
        turned = self.weight_EOI.stride(2) != 1 and self.weight_EOI.stride(1) == 1
        return self.products.weight_gradient(dy, x, bounds, paired=paired, turned=turned)

    def update_gradients(
        self, x: Rows, dy: Rows, dinner_RK: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the factors of the update, in their dtypes."""
        assert self.a_EKI is not None
        assert self.update is not None
        a, b, scale = self.update
        rank = a.shape[1]
        da_EKI = TORCH.weight_gradient(dinner_RK, x, bounds)[:, :rank]
        inner_RK = TORCH.forward(x, self.a_EKI, bounds)
        db_EOK = TORCH.weight_gradient(dy, inner_RK, bounds)[..., :rank]
        return da_EKI.to(a.dtype), db_EOK.to(b.dtype) * scale


def in_dtype_of(like: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """Weights in the activations' dtype.

    Cast here, and again in backward, rather than by the caller: what autograd keeps is then the parameter
    itself, and not a copy of it that lives until backward.
    """
    return tuple(None if weight is None else weight.to(like.dtype) for weight in weights)
