"""The modules that rules name inside the fused experts: `expert_fc1`, `moe_act`, `expert_fc2`.

The block is one autograd node, so these compute nothing. They hold the parameters, and the rule for what their
backward needs, which is their input: the rows for `expert_fc1`, the first projection for `moe_act`. The input of
`expert_fc2`, the activation, is recomputed by the kernel of the activation's gradient and never saved.
"""

from typing import Any

import torch
from torch import nn

from pagestash.moe.projection import Weight
from pagestash.moe.saving import Half, Saving
from pagestash.pages.pool import PagePool

ROWS_OF_OTHERS = (
    "home='recompute' for expert_fc1: its input came from other ranks and cannot be recomputed here; "
    "use home='stash' or home='offload'"
)


class SelfSaving(nn.Module):
    """A module that sees to its saved tensor itself, where a keeper asks for it.

    The two requests are those of a keeper: `use_pool` under a stash rule, `use_recompute` under a recompute rule.
    Without either, autograd saves the tensor, and the hook gives it the home of the module's rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool: PagePool | None = None
        self.account = 0
        self.recomputes = False
        self.backward_half: Half | None = None

    def use_half(self, half: Half | None) -> None:
        """Ask `half`, in every backward of a forward from here on, which gradients it is for; None: for all."""
        self.backward_half = half

    def use_pool(self, pool: PagePool | None, account: int = 0) -> None:
        """Stash in `pool` from here on, straight from the kernels; None leaves it to autograd."""
        self.pool, self.account = pool, account

    def use_recompute(self, on: bool) -> None:
        """Whether backward recomputes the tensor, so that forward saves nothing."""
        self.recomputes = on

    def plain(self) -> bool:
        """Whether all is left to autograd, and nobody has a hook here: a compiler may have it in a graph."""
        asked = self.pool is not None or self.recomputes or self.backward_half is not None
        return not (asked or self._forward_pre_hooks)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no keeper."""
        own = {"pool": None, "account": 0, "recomputes": False, "backward_half": None}
        return super().__getstate__() | own

    def saving(self) -> Saving:
        """How the tensor waits for backward."""
        return Saving(module=self, pool=self.pool, account=self.account, recompute=self.recomputes)


class ExpertLinear(SelfSaving):
    """A projection of each expert: `weight` [E, rows, columns] and perhaps `bias` [E, rows].

    Calling it gives what the fused block multiplies with. It is a call, and not a look at attributes, so
    that what hangs on a module's forward (FSDP2 brings the parameters there) happens.
    """

    def __init__(
        self,
        experts: int,
        rows: int,
        columns: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(experts, rows, device=device, dtype=dtype)) if bias else None
        nn.init.normal_(self.weight, std=columns**-0.5)

    def forward(self) -> Weight:
        return Weight(self.weight, self.bias)


class ExpertFC1(ExpertLinear):
    """The first projection, gate and then linear: `weight` [E, 2N, D], or [E, N, D] if not `gated`.

    Its rule is that of the rows. Those that came over the wire are saved as they arrived. Without expert
    parallelism (`wired=False`) they are permuted from the layer's input again, and the rule is that input's.
    """

    def __init__(
        self, experts: int, inner: int, width: int, *, gated: bool = True, wired: bool = False, **made: Any
    ) -> None:
        super().__init__(experts, 2 * inner if gated else inner, width, **made)
        self.wired = wired

    def use_recompute(self, on: bool) -> None:
        """Nothing more than is done anyway; refused where the rows came from other ranks."""
        if on and self.wired:
            raise ValueError(ROWS_OF_OTHERS)
        super().use_recompute(on)


class MoEAct(SelfSaving):
    """The gated activation. Its rule is that of the first projection, which one product recomputes."""


class ExpertFC2(ExpertLinear):
    """The second projection: `weight` [E, D, N]. It saves nothing, so every rule means the same."""

    def __init__(self, experts: int, width: int, inner: int, **made: Any) -> None:
        super().__init__(experts, width, inner, **made)
