"""What may be too small for a step, as only the device knows: the pool, and buffers with a capacity.

Of both, `flag` is a 0-d float32 on the device, 1 after the bound was exceeded. `uses` counts on the host what can
exceed it. Between steps, `grow()` raises the bound to what was wanted, clears the flag and says if anything moved.
"""

import logging
from typing import Any, Protocol, cast

import torch
from torch import nn

from pagestash.saved.keeper import Keeper
from pagestash.saved.module_hook import RunHook
from pagestash.sizes import format_bytes

log = logging.getLogger("pagestash")


class PoolBound:
    """The keeper's pool, from the moment there is one."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def flag(self) -> torch.Tensor | None:
        """None while there is no pool, which nothing can exceed."""
        return self._keeper.overflow

    @property
    def uses(self) -> int:
        return self._keeper.reservations

    def grow(self) -> bool:
        pool = self._keeper.pool
        if pool is None:
            return False
        before = pool.device_pages
        self._keeper.grow_pool()
        pool.reset()
        if pool.device_pages == before:
            return False
        size = format_bytes(pool.device_pages * pool.page_bytes)
        log.warning("the pool overflowed and has grown to %s; the batch runs again", size)
        return True


class Bounded(Protocol):
    """A module whose buffers bound a number that only the device knows, such as received rows.

    `over_capacity` is a 0-d float32: 1 after the bound was exceeded. `grow_capacity` raises the bound to what was
    wanted and returns whether it did; all ranks of the module's group call it together, and it may wait.
    """

    over_capacity: torch.Tensor

    def grow_capacity(self) -> bool: ...

    def clear_over_capacity(self) -> None: ...


class CapacityBound:
    """A module with a capacity; every forward of it is a use."""

    def __init__(self, module: nn.Module) -> None:
        self._module = cast(Bounded, module)
        self.uses = 0
        module.register_forward_pre_hook(RunHook(self._count))

    def _count(self, *_: Any) -> None:
        self.uses += 1

    @property
    def flag(self) -> torch.Tensor:
        return self._module.over_capacity

    def grow(self) -> bool:
        grown = self._module.grow_capacity()
        if grown:
            log.warning("a layer received more rows than its capacity, which has grown; the batch runs again")
        self._module.clear_over_capacity()
        return grown


def bounds_of(keeper: Keeper) -> list[PoolBound | CapacityBound]:
    """The pool, then the modules with a capacity, in the same order on all ranks."""
    found = [module for module in keeper.modules() if hasattr(module, "grow_capacity")]
    # A layer and its bounded part may both have the method, with one flag; one of them is enough.
    modules = {id(cast(Bounded, module).over_capacity): module for module in found}
    return [PoolBound(keeper), *map(CapacityBound, modules.values())]
