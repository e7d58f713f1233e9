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

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagestash.kernels.moe.grouped import grouped_mm
from pagestash.kernels.moe.low_rank import add_product_

ALIGNED = 16
"""Ranks are padded to multiples of this: what `grouped_mm`'s alignment allows on every backend."""

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
        """All of them, for whoever asks which require a gradient, or which are weights."""
        return (self.stored, self.bias_EO, *([] if self.update is None else self.update[:2]))


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight [E, O, I] and the factors of its update, ready to multiply with.

    All are in the activations' dtype; `a_EKI` and `b_EOK` are contiguous and of padded rank, and `b_EOK` is times
    the scale. It is made in forward, and again in backward: what autograd keeps is then the parameters themselves,
    and not copies of them that live until backward.
    """

    weight_EOI: torch.Tensor
    a_EKI: torch.Tensor | None = None
    b_EOK: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: Weight, like: torch.Tensor) -> "Projection":
        weight_EOI = weight.matrices().to(like.dtype)
        if weight.update is None:
            return cls(weight_EOI)
        a, b, scale = weight.update
        rank = a.shape[1]
        padded = -(-rank // ALIGNED) * ALIGNED
        if padded == rank:
            a_EKI, b_EOK = like.new_empty(a.shape), like.new_empty(b.shape)
            torch.mul(b, scale, out=b_EOK)
            return cls(weight_EOI, a_EKI.copy_(a), b_EOK)
        a_EKI, b_EOK = like.new_zeros(a.shape[0], padded, a.shape[2]), like.new_zeros(*b.shape[:2], padded)
        a_EKI[:, :rank].copy_(a)
        torch.mul(b, scale, out=b_EOK[..., :rank])
        return cls(weight_EOI, a_EKI, b_EOK)

    def forward(self, x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        y_RO = _product(x_RI, self.weight_EOI.transpose(-2, -1), ends_E)
        if self.a_EKI is not None and self.b_EOK is not None:
            inner_RK = _product(x_RI, self.a_EKI.transpose(-2, -1), ends_E)
            add_product_(y_RO, inner_RK, self.b_EOK.transpose(-2, -1), ends_E)
        return y_RO

    def inner_gradient(self, dy_RO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the inner rows [R, K]; None without an update."""
        return None if self.b_EOK is None else _product(dy_RO, self.b_EOK, ends_E)

    def input_gradient(
        self, dy_RO: torch.Tensor, dinner_RK: torch.Tensor | None, ends_E: torch.Tensor
    ) -> torch.Tensor:
        dx_RI = _product(dy_RO, self.weight_EOI, ends_E)
        if self.a_EKI is not None and dinner_RK is not None:
            add_product_(dx_RI, dinner_RK, self.a_EKI, ends_E)
        return dx_RI

    def update_gradients(
        self,
        update: LowRank,
        x_RI: torch.Tensor,
        dy_RO: torch.Tensor,
        dinner_RK: torch.Tensor,
        ends_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the factors of `update`, in their dtypes."""
        assert self.a_EKI is not None
        a, b, scale = update
        rank = a.shape[1]
        da_EKI = grouped_mm(dinner_RK.t(), x_RI, ends_E)[:, :rank]
        inner_RK = _product(x_RI, self.a_EKI.transpose(-2, -1), ends_E)
        db_EOK = grouped_mm(dy_RO.t(), inner_RK, ends_E)[..., :rank]
        return da_EKI.to(a.dtype), db_EOK.to(b.dtype) * scale


def _product(rows: torch.Tensor, matrices: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """`grouped_mm`, also of a buffer of no rows."""
    return grouped_mm(rows, matrices, ends_E) if rows.shape[0] else rows.new_empty(0, matrices.shape[2])
