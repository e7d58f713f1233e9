"""What an experts module of transformers multiplies with: a parameter, a quantised one, one with a low-rank update.

Others put parametrizations on the module's weights: bitsandbytes one that makes the weight of packed integers,
PEFT, for the time of a forward, one that adds its low-rank update. The weight that they make is no parameter, so
autograd would keep it until backward, a copy in each layer. The block is given what it is made of instead.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from pagestash.moe.projection import LowRank, Read, Weight
from pagestash.torch_internals import children_of

UPDATES = "_pagestash_updates"
"""The attribute of an experts module that has the low-rank updates of the call that runs, by the weight's name."""
FACTORS = "_LoraFactorsProxy"
"""PEFT's parametrization that adds the low-rank update `scaling · lhs @ rhs`."""


def weight_of(module: Any, name: str, bias: torch.Tensor | None = None) -> Weight:
    """The weight `name` of `module` as [E, rows, columns], whatever it is made of."""
    turned: bool = module.is_transposed
    updates = module.__dict__.get(UPDATES)
    update: LowRank | None = updates.get(name) if updates else None
    steps, stored = _parametrizations(module, name)
    if update is None and steps and type(steps[-1]).__name__ == FACTORS:
        update = update_of(steps[-1].lhs, steps[-1].rhs, steps[-1].scaling, turned)
        steps = steps[:-1]
    if steps and not stored.is_floating_point() and not any(_is_peft(step) for step in steps):
        return Weight(stored, bias, update, _reader(steps, turned))
    if steps:
        kinds = ", ".join(type(step).__name__ for step in steps)
        warnings.warn(
            f"pagestash: {kinds} makes {name} of {type_before_parametrizations(module).__name__}, "
            "so backward keeps a copy of it",
            stacklevel=2,
        )
        stored, update = getattr(module, name), module.__dict__.get(UPDATES, {}).get(name)
    return Weight(stored.transpose(1, 2) if turned else stored, bias, update)


def update_of(lhs: torch.Tensor, rhs: torch.Tensor, scale: float, turned: bool) -> LowRank:
    """`scale · lhs @ rhs`, which is added to a weight [E, rows, columns], or to its transpose if `turned`."""
    return LowRank(lhs.transpose(1, 2), rhs.transpose(1, 2), scale) if turned else LowRank(rhs, lhs, scale)


def unreadable(module: Any, name: str) -> str | None:
    """The kind of a quantised weight that the block cannot read; None of one that it can."""
    steps, stored = _parametrizations(module, name)
    if not isinstance(stored, torch.Tensor) or type(stored).__module__.startswith("torchao"):
        return type(stored).__name__
    if steps or (stored.is_floating_point() and stored.itemsize > 1):
        return None
    return str(stored.dtype)


def _parametrizations(module: Any, name: str) -> tuple[list[Any], torch.Tensor]:
    """What is done to a weight in order, and to which tensor; of a plain parameter nothing."""
    # (Not by getattr, which makes an error and its text where there are none: 3 µs in each call.)
    found: Any = children_of(module).get("parametrizations")
    if not isinstance(found, nn.ModuleDict) or name not in found:
        return [], getattr(module, name)
    chain: Any = found[name]
    return list(chain), chain.original


def _reader(steps: list[Any], turned: bool) -> Read:
    def read(stored: torch.Tensor) -> torch.Tensor:
        for step in steps:
            stored = step(stored)
        return stored.transpose(1, 2) if turned else stored

    return read


def _is_peft(step: Any) -> bool:
    return type(step).__module__.startswith("peft.")
