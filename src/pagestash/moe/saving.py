"""How the tensors of an expert block wait for backward: in pages, saved by autograd, or recomputed."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from pagestash.kernels.moe.activations import Activation, ActivationName
from pagestash.moe.lease import Lease
from pagestash.pages.pool import PagePool
from pagestash.policy import Rule
from pagestash.saved.fused import claim, rule_of
from pagestash.saved.received_rows import ReceivedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How one tensor waits for backward."""

    pool: PagePool | None = None
    """Its pages, where the block writes them itself; None leaves the tensor to autograd."""
    account: int = 0
    recompute: bool = False
    """Whether backward recomputes it, so that nothing waits."""
    module: nn.Module | None = None
    """Whose rule holds for what autograd saves; None: that of the region we are in."""

    def lease(
        self, shape: tuple[int, int], dtype: torch.dtype, rows: torch.Tensor, *, expendable: bool = False
    ) -> Lease | None:
        """Pages for the valid `rows`, an integer on the device; None where the tensor does not go to pages.

        Nor does one that is not `expendable` where the step keeps what finds no page, and there is none.
        """
        if self.pool is None or self.recompute:
            return None
        if not expendable:
            self.pool.flush()
            if self.pool.room.denies(math.prod(shape) * dtype.itemsize, rows, shape[0]):
                return None
        return Lease(self.pool, shape, dtype, rows, account=self.account, expendable=expendable)

    def stash_rule(self) -> Rule | None:
        """The rule by which rows in excess go to pages, from our kernels or from autograd; None: they do not."""
        rule = None if self.recompute else rule_of(self.module)
        return rule if rule is not None and rule.home == "stash" else None

    def save(
        self,
        tensor: torch.Tensor | None,
        *,
        rows: torch.Tensor | None = None,
        capacity: int = 0,
        sized: bool = False,
    ) -> None:
        """`tensor` is about to be saved by autograd; see `claim`."""
        claim(self.module, tensor, rows=rows, capacity=capacity, sized=sized)


@dataclass(slots=True)
class Half:
    """Which gradients the running backward is for, where a pipeline schedule splits it in two.

    Autograd does not tell a function of Python, and would have all products computed in either half.
    """

    inputs: bool = True
    weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """What a block needs to know besides its tensors."""

    activation: ActivationName | Activation = "silu"
    interleaved: bool = False
    """Whether gate and linear part alternate in the rows of `up` and in its bias; else all gates come first."""
    x: Saving = Saving()
    """How the rows wait that the first projection multiplies."""
    h: Saving = Saving()
    """How the first projection waits."""
    needs_backward: bool = True
    """Whether a backward may follow; without one, nothing is put into pages."""
    half: Half | None = None
    counted: ReceivedRows | None = None
    """Who is told of received rows, where a keeper chooses how many are expected."""
