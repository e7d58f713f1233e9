"""How the tensors of an expert block wait for backward: in pages, saved by autograd, or recomputed.

Under a rule with `bits=8` the keeper codes them: as soon as forward has used them, where it can; see
`BlockOptions.by_rules`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pagestash.kernels.moe.activation import Activation, ActivationName
from pagestash.moe.lease import Lease
from pagestash.pages.pool import PagePool
from pagestash.policy import Rule
from pagestash.saved.eight_bits import CODED, LEAST_WIDTH
from pagestash.saved.fused import claim, goes_to_pages, put_away, rule_of
from pagestash.saved.packed import Packed
from pagestash.saved.received_rows import ReceivedRows
from pagestash.saved.region import in_recompute


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
        goes_to_pages()
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

    def put_away(self, tensor: torch.Tensor, rows: torch.Tensor, *, sized: bool = False) -> Packed:
        """`tensor` goes to its home now; see `put_away`."""
        return put_away(self.module, tensor, rows=rows, sized=sized)


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
    coded: bool = False
    """Whether rows are coded as soon as forward has used them: `by_rules` decides."""
    needs_backward: bool = True
    """Whether a backward may follow; without one, nothing is put into pages."""
    half: Half | None = None
    functional: bool = False
    """Whether it runs as an operator of a compiled graph: backward writes to nothing that it is given, and no rule
    of a part holds."""
    counted: ReceivedRows | None = None
    """Who is told of received rows, where a keeper chooses how many are expected."""

    def by_rules(self, x_TD: torch.Tensor, rows: int, h_columns: int, *, received: bool) -> "BlockOptions":
        """These options for one call, by the rules that hold where it runs.

        Rows are put away at once if the rule of the first projection has `bits`, and for received rows the rule
        of the rows, too. Else the keeper codes them when the region ends. (`rows` are those of the smallest buffer
        that would be coded.) Nothing is put away in a region that is recomputed, whose replay must save the same
        tensors.

        The block writes no pages under such a rule. Nor does it for the first projection of rows that are coded:
        where its pages were refused, it would be recomputed from these, to other bits.
        """
        if self.functional:
            return self
        of_h = None if self.h.recompute else rule_of(self.h.module)
        of_x = rule_of(self.x.module)
        h_bits, x_bits = (rule is not None and rule.bits is not None for rule in (of_h, of_x))
        if not (h_bits or x_bits):
            return self
        widths = ((of_h, h_columns), (of_x, x_TD.shape[1]))[: 2 if received else 1]
        fit = all(_codes(rule, x_TD.dtype, rows, width) for rule, width in widths)
        x = replace(self.x, pool=None) if x_bits else self.x
        coded = fit and self.needs_backward and not in_recompute()
        return replace(self, x=x, h=replace(self.h, pool=None), coded=coded)


OF_WEIGHTS = ("up", "up_bias", "up_a", "up_b", "down", "down_bias", "down_a", "down_b")
"""The inputs that are weights: a pipeline schedule may ask for their gradients in a half of its own."""


def needs(ctx: Any, name: str) -> bool:
    """Whether the running backward is to compute the gradient of the input `name` of an autograd function of ours.

    Its `ctx` has the names of the inputs and the options.
    """
    half = ctx.options.half
    if half is not None and not (half.weights if name in OF_WEIGHTS else half.inputs):
        return False
    return asked(ctx, name)


def asked(ctx: Any, name: str) -> bool:
    """Whether the input `name` requires a gradient at all."""
    return bool(ctx.needs_input_grad[ctx.inputs.index(name)])


def asks_for_rows(ctx: Any, options: BlockOptions) -> bool:
    """Whether backward may ask for the input of the first projection.

    By what was asked for alone, not by what the pool granted: a recomputed forward must save the same tensors.
    """
    wanted = (asked(ctx, name) for name in ("up", "up_a", "up_b"))
    return options.h.pool is not None or options.h.recompute or any(wanted)


def _codes(rule: Rule | None, dtype: torch.dtype, rows: int, width: int) -> bool:
    """Whether `rule` has a tensor [rows, width] coded."""
    if rule is None or rule.bits is None or dtype not in CODED:
        return False
    return width >= LEAST_WIDTH and rows * width * dtype.itemsize >= max(rule.least_bytes, 1)
