"""Finding `checkpoint_name` tags in a traced layer, and the tag behind a saved value.

A layer's jaxpr nests: a tag may sit inside a `jit`, a `shard_map` or a branch. Both questions are answered by
walking the nested jaxprs, so no bookkeeping is asked of the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

# What may stand between a tagged value and the point where it is saved without changing it:
# `jax.checkpoint` pins the precision of what it saves, `shard_map` and `vmap` types add casts.
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
    """A saved value that carries a tag."""

    name: str


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
    name = _tag_behind(jaxpr, var)
    return Computed() if name is None else FromTag(name)


def used_inputs(jaxpr: core.Jaxpr) -> set[int]:
    """Indices of inputs that some operation reads; the others only pass through."""
    read = {var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, core.Literal)}
    return {index for index, var in enumerate(jaxpr.invars) if var in read}


def _tag_behind(jaxpr: core.Jaxpr, var: Any) -> str | None:
    while not isinstance(var, core.Literal):
        eqn = next((e for e in jaxpr.eqns if any(var is out for out in e.outvars)), None)
        if eqn is None:
            return None
        name = _tag_of(eqn)
        if name is not None:
            return name
        position = next(i for i, out in enumerate(eqn.outvars) if out is var)
        if eqn.primitive.name in _TRANSPARENT:
            var = eqn.invars[position if len(eqn.outvars) > 1 else 0]
            continue
        for inner in _inner_jaxprs(eqn):
            if len(inner.outvars) == len(eqn.outvars):
                name = _tag_behind(inner, inner.outvars[position])
                if name is not None:
                    return name
                forwarded = _forwarded_input(inner, inner.outvars[position])
                if forwarded is not None and len(inner.invars) == len(eqn.invars):
                    var = eqn.invars[forwarded]
                    break
        else:
            return None
    return None


def _tag_of(eqn: Any) -> str | None:
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    # The form under `jax_remat3`: an object that stands for the operation.
    operation = eqn.params.get("_prim")
    if type(operation).__name__ == "CheckpointName":
        return operation.params["name"]
    return None


def _forwarded_input(jaxpr: core.Jaxpr, var: Any) -> int | None:
    return next((i for i, invar in enumerate(jaxpr.invars) if invar is var), None)


def _inner_jaxprs(eqn: Any) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
