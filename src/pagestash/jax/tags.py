"""Find the `checkpoint_name` tags of a traced layer, and the tag that a saved value carries.

Jaxprs nest: a tag may be inside a `jit`, a `shard_map` or a branch. Both searches walk the nested jaxprs, so
the model needs no bookkeeping.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

# Operations between a tagged value and the point where it is saved that do not change it:
# `jax.checkpoint` pins the precision of what it saves, `shard_map` and `vmap` add casts of types.
_TRANSPARENT = (
    "reduce_precision",
    "copy",
    "copy_p",
    "optimization_barrier",
    "pvary",
    "pcast",
    "sharding_constraint",
)


@dataclass(frozen=True, slots=True)
class FromInput:
    """A saved value that is one of the layer's own inputs: nothing to store."""

    index: int


@dataclass(frozen=True, slots=True)
class FromConstant:
    """A saved value that is a constant of the program: nothing to store."""

    value: Any


@dataclass(frozen=True, slots=True)
class FromTag:
    """A saved value that carries a tag.

    `names` has one entry, or several if branches of a conditional return one saved value under different tags.
    """

    names: frozenset[str]
    repeated_by: str = ""
    """The loop or `vmap` that contains the tag; it adds an axis that the layer's author did not write."""

    def all_in(self, names: tuple[str, ...]) -> bool:
        return self.names <= frozenset(names)


@dataclass(frozen=True, slots=True)
class Computed:
    """A saved value without a tag: stored whole."""


Origin = FromInput | FromConstant | FromTag | Computed


def tags_in(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Every tag in `jaxpr` and all it contains."""
    for eqn in jaxpr.eqns:
        name = _tag_of(eqn)
        if name is not None:
            yield name
        for inner in _inner_jaxprs(eqn):
            yield from tags_in(inner)


def origin_of(jaxpr: core.Jaxpr, consts: list[Any], var: Any) -> Origin:
    """Where an output `var` of a top-level jaxpr comes from."""
    if isinstance(var, core.Literal):
        return FromConstant(np.asarray(var.val, var.aval.dtype))  # type: ignore[attr-defined]
    for index, invar in enumerate(jaxpr.invars):
        if var is invar:
            return FromInput(index)
    for constvar, value in zip(jaxpr.constvars, consts):
        if var is constvar:
            return FromConstant(value)
    found = _behind(jaxpr, var, "")
    return found if isinstance(found, FromTag) else Computed()


def used_inputs(jaxpr: core.Jaxpr) -> set[int]:
    """Indices of inputs that some operation reads; the others only pass through."""
    read = {var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, core.Literal)}
    return {index for index, var in enumerate(jaxpr.invars) if var in read}


@dataclass(frozen=True, slots=True)
class _Input:
    """A value that an inner jaxpr passes through unchanged."""

    index: int


class _Constant:
    """A value that depends on no input, such as what a branch returns for another branch's saved value."""


def _behind(jaxpr: core.Jaxpr, var: Any, repeated_by: str) -> FromTag | _Input | _Constant | None:
    """The tag that `var` carries, inside `repeated_by`; None if `var` is more than a tagged value."""
    while True:
        if isinstance(var, core.Literal) or any(var is constant for constant in jaxpr.constvars):
            return _Constant()
        index = next((i for i, invar in enumerate(jaxpr.invars) if invar is var), None)
        if index is not None:
            return _Input(index)
        eqn = next(e for e in jaxpr.eqns if any(var is out for out in e.outvars))
        position = next(i for i, out in enumerate(eqn.outvars) if out is var)
        inside = repeated_by or _repeated_by(eqn)
        name = _tag_of(eqn)
        if name is not None:
            return FromTag(frozenset({name}), inside)
        if eqn.primitive.name in _TRANSPARENT:
            var = eqn.invars[position if len(eqn.outvars) > 1 else 0]
            continue
        inner = [j for j in _inner_jaxprs(eqn) if len(j.outvars) == len(eqn.outvars)]
        found = [_behind(j, j.outvars[position], inside) for j in inner]
        if not inner:
            return _Constant() if not _inputs_behind(jaxpr, var) else None
        if len(inner) == 1:
            only = found[0]
            if isinstance(only, _Input) and len(inner[0].invars) == len(eqn.invars) and not inside:
                var = eqn.invars[only.index]
                continue
            return only if isinstance(only, FromTag) else None
        return _of_branches(found)


def _of_branches(found: list[Any]) -> FromTag | None:
    """In a slot that branches share, one may save a tagged value, and another any value of that shape."""
    tags = [each for each in found if isinstance(each, FromTag)]
    if not tags or len(tags) + sum(isinstance(each, _Constant) for each in found) < len(found):
        return None
    return FromTag(
        frozenset().union(*(tag.names for tag in tags)),
        next((t.repeated_by for t in tags if t.repeated_by), ""),
    )


def _repeated_by(eqn: Any) -> str:
    if eqn.primitive.name in ("scan", "while"):
        return "a loop"
    # vmap leaves no operation of its own; jax puts its name into the name stack of the operations under it.
    stack = getattr(getattr(eqn, "source_info", None), "name_stack", "")
    return "a vmap" if "vmap(" in str(stack) else ""


def _inputs_behind(jaxpr: core.Jaxpr, var: Any) -> bool:
    """Whether `var` depends on any input of `jaxpr`."""
    needed, seen = [var], set()
    while needed:
        one = needed.pop()
        if isinstance(one, core.Literal) or one in seen:
            continue
        seen.add(one)
        if any(one is invar for invar in jaxpr.invars):
            return True
        for eqn in jaxpr.eqns:
            if any(one is out for out in eqn.outvars):
                needed += eqn.invars
    return False


def _tag_of(eqn: Any) -> str | None:
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    # The form under `jax_remat3`: an object that represents the operation.
    operation = eqn.params.get("_prim")
    if type(operation).__name__ == "CheckpointName":
        return operation.params["name"]
    return None


def _inner_jaxprs(eqn: Any) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
