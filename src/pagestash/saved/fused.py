"""What a fused operation says of the tensors it saves.

One autograd node may stand for several modules: it saves the inputs and weights of all of them, in one region.
These functions tell the keeper whose tensors are whose. Outside a step, and in a replay, they do nothing.
"""

import torch
from torch import nn

from pagestash.saved.compiled import hidden
from pagestash.saved.region import Region, frames, running_again
from pagestash.saved.storage import storage_keys


@hidden
def claim(
    module: nn.Module | None, tensor: torch.Tensor, *, rows: torch.Tensor | None = None, capacity: int = 0
) -> None:
    """What is saved of `tensor` in the region we are in belongs to `module`, if a rule names that.

    For a fused operation that stands for several modules: its autograd node saves the inputs of all of them.
    With `rows` only that many of the tensor's `capacity` rows are valid, whoever it belongs to: where a node saves
    tensors of several kinds, a region with `rows` would take any that happens to have as many rows for one of them.
    """
    if torch.compiler.is_compiling():
        return
    current = frames()
    if not current:
        return
    inner = current[-1]
    name = None if module is None else inner.owner.names.get(module)
    if inner.whole_step or running_again() or (name is None and rows is None):
        return
    rule, run = inner.rule, inner.run
    if name is None:
        name = inner.name
    else:
        run = None
        rule = inner.owner.policy.rule_for(name)
        if rule is not None and rule.home == "recompute":
            return  # the module makes its tensors again by itself; what it saves is ours
    same = (
        other
        for _, other in inner.claims.values()
        if (other.name, other.capacity) == (name, capacity) and other.rule is rule and other.rows is rows
    )
    owner = next(same, None) or Region(
        inner.owner, name, rule, rows, capacity, rows is not None, weights=inner.weights, run=run
    )
    inner.claim(tensor, owner)


@hidden
def stay(tensor: torch.Tensor | None) -> None:
    """What is saved of `tensor` in the region we are in is kept, where a rule would stash it.

    For a tensor whose size is known: in pages it would take as much memory, and two copies.
    """
    if torch.compiler.is_compiling():
        return
    current = frames()
    if not current or tensor is None:
        return
    inner = current[-1]
    owner = inner.claimed(tensor.untyped_storage()._cdata) or inner
    if owner.rule is not None and owner.rule.home == "stash":
        inner.claim(tensor, Region(inner.owner, owner.name, None, weights=inner.weights))


@hidden
def note_weights(*tensors: torch.Tensor | None) -> None:
    """These are weights, which stay where they are, in the region that we are in.

    For an operation whose parameters are those of other modules: the region's own are known without it.
    """
    if torch.compiler.is_compiling():
        return
    current = frames()
    if current:
        current[-1].weights |= storage_keys(tensors)


@hidden
def named(module: nn.Module) -> bool:
    """Whether a rule names `module`, in the step that we are in."""
    if torch.compiler.is_compiling():
        return False
    current = frames()
    return bool(current) and module in current[-1].owner.names
