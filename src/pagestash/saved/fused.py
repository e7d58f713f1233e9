"""What a fused operation says of the tensors it saves.

One autograd node may stand for several modules: it saves the inputs and weights of all of them, in one region.
These functions tell the keeper whose tensors are whose. Outside a step, and in a replay, they do nothing.

    with fused(up, down):                              # a region; `up` and `down` are weights, which stay
        y = Operation.apply(x, up, down)               # whose forward says, before it saves `h`:
        claim(part, h, rows=count, capacity=len(h))    # `h` falls under the rule of the module `part`
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from pagestash.policy import Rule
from pagestash.saved.compiled import hidden
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.packed import Packed
from pagestash.saved.region import Forward, Recording, Region, frames, region, replaying
from pagestash.saved.storage import storage_keys
from pagestash.torch_internals import storage_key

_NO_REGION = nullcontext()


@hidden
def fused(*weights: torch.Tensor | None) -> AbstractContextManager[None]:
    """A region for one fused operation, with `weights` that are other modules' and stay where they are."""
    return _region_of(weights) if frames() else _NO_REGION


@contextmanager
@hidden
def _region_of(weights: tuple[torch.Tensor | None, ...]) -> Iterator[None]:
    with region():
        current = frames()
        if current:
            current[-1].weights |= storage_keys(weights)
        yield


@hidden
def claim(
    module: nn.Module | None,
    tensor: torch.Tensor | None,
    *,
    rows: torch.Tensor | None = None,
    capacity: int = 0,
    sized: bool = False,
) -> None:
    """What is saved of `tensor` in the region we are in belongs to `module`, if a rule names that.

    For a fused operation that stands for several modules: its autograd node saves the inputs of all of them.
    With `rows` only that many of the tensor's `capacity` rows are valid, whoever it belongs to. Claims for one
    module that give the same tensor `rows` move together.
    A `sized` tensor is kept where a rule would stash it: in pages it would take as much memory, and two copies. The
    rule's `fraction` of it is offloaded: the copy engine, too, needs a size that the host knows. With `bits=8` both
    are coded, valid `rows` alone if given. Nobody may have written all of it: recomputed rows are not compared.
    """
    if tensor is None or torch.compiler.is_compiling() or not frames():
        return
    inner = frames()[-1]
    owner = _owner(inner, module, rows, capacity)
    if owner is not None:
        inner.claim(tensor, owner)
    if sized:
        if isinstance(inner.run, Recording):
            inner.run.leave_unchecked(tensor)
        owner = inner.claimed(storage_key(tensor)) or inner
        if owner.rule is not None and owner.rule.home == "stash":
            # Indices stay: they are small, and a copy of its own would use the link badly.
            rule = owner.rule.for_expected_rows() if tensor.is_floating_point() else None
            owner = _region_for(inner, owner.name, rule, rows, capacity)
            inner.claim(tensor, owner)
        if owner is not inner:
            owner.sized = rows is not None


@hidden
def put_away(
    module: nn.Module | None, tensor: torch.Tensor, *, rows: torch.Tensor, sized: bool = False
) -> Packed:
    """Claim `tensor`, and hand it to its home at once. Forward may then let go of it.

    `unpack` of what is returned gives the tensor back. Not for a region that is recomputed.
    """
    claim(module, tensor, rows=rows, capacity=tensor.shape[0], sized=sized)
    inner = frames()[-1]
    assert isinstance(inner.owner, SavedTensorHooks)
    return inner.owner.put_away(inner, tensor)


def _region_for(
    inner: Region,
    name: str,
    rule: Rule | None,
    rows: torch.Tensor | None = None,
    capacity: int = 0,
    run: Forward | None = None,
) -> Region:
    """A region inside `inner` for claimed tensors: one for all claims that are alike, which move together."""
    for _, other in inner.claims.values():
        if (other.name, other.capacity) == (name, capacity) and other.rule is rule and other.rows is rows:
            return other
    return Region(inner.owner, name, rule, rows, capacity, weights=inner.weights, run=run)


def _owner(
    inner: Region, module: nn.Module | None, rows: torch.Tensor | None, capacity: int
) -> Region | None:
    """The region of `module` inside `inner`, one for all claims that are alike; None: there is nothing to claim."""
    name = None if module is None else inner.owner.names.get(module)
    if inner.whole_step or replaying() or (name is None and rows is None):
        return None
    rule, run = inner.rule, inner.run
    if name is None:
        name = inner.name
    else:
        run = None
        rule = inner.owner.policy.rule_for(name)
        if rule is not None and rule.home == "recompute":
            return None  # the module recomputes its tensors by itself; what it saves is ours
    return _region_for(inner, name, rule, rows, capacity, run)


@hidden
def has_rule(module: nn.Module) -> bool:
    """Whether a rule names `module`, in the step that we are in."""
    current = () if torch.compiler.is_compiling() else frames()
    return bool(current) and module in current[-1].owner.names


@hidden
def rule_of(module: nn.Module | None) -> Rule | None:
    """The rule of what is claimed for `module` in the region that we are in."""
    current = () if torch.compiler.is_compiling() else frames()
    if not current:
        return None
    inner = current[-1]
    name = None if module is None else inner.owner.names.get(module)
    return inner.rule if name is None else inner.owner.policy.rule_for(name)


@hidden
def goes_to_pages() -> None:
    """The operation that runs now writes to pages of a keeper's pool by itself."""
    current = () if torch.compiler.is_compiling() else frames()
    if current:
        current[-1].owner.check_stream(current[-1].name)


@hidden
def needs_backward(*tensors: torch.Tensor | None) -> bool:
    """Whether this forward must put away what backward will ask for.

    Not in a replay: the first forward of the region has done so.
    """
    return (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
        and not replaying()
    )
