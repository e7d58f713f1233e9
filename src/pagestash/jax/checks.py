"""Checks of what a user may get wrong about a layer; each error says what to do.

Every check runs while the layer is traced, before anything is compiled.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .geometry import Tag
from .policy import Rows, StashPolicy
from .tags import FromTag, Origin


def check_names(tags_of_layers: Sequence[frozenset[str]], policy: StashPolicy) -> None:
    """Raise unless every name of the policy tags a value in some group of layers."""
    present = frozenset().union(*tags_of_layers)
    for name in (*policy.names, *policy.keep):
        if name not in present:
            close = difflib.get_close_matches(name, present, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            have = ", ".join(map(repr, sorted(present))) or "no tags at all"
            raise ValueError(
                f"the policy names {name!r}, but no layer has that tag; the layers have {have}.{hint} "
                "Tag the tensor with jax.ad_checkpoint.checkpoint_name, or remove the name."
            )


def checked_tags(
    layer: Callable[..., Any], saved: Sequence[tuple[Origin, Any]], policy: StashPolicy, shards: int
) -> tuple[Tag, ...]:
    found = []
    for origin, aval in saved:
        assert isinstance(origin, FromTag)
        name = ", ".join(sorted(origin.names))
        if origin.repeated_by:
            raise ValueError(
                f"tag {name!r} in {called(layer)} is inside {origin.repeated_by}: the saved tensor has shape "
                f"{aval.shape}, with an axis that {origin.repeated_by} added and that is not the row axis. Tag the "
                "value outside of it, with the rows as leading axis, or move the name to keep"
            )
        if not aval.shape or aval.shape[0] % shards:
            raise ValueError(
                f"tag {name!r} in {called(layer)} has shape {aval.shape}: expected a leading axis of rows that "
                f"{shards} shard(s) divide; tag a tensor of shape (rows, …), or move the name to keep"
            )
        found.append(Tag(name, (aval.shape[0] // shards, *aval.shape[1:]), aval.dtype))
    if not found:
        return ()
    capacity = policy.row_capacity or max({t.shape[0] for t in found}, key=[t.shape[0] for t in found].count)
    wrong = [tag for tag in found if tag.shape[0] != capacity]
    if wrong:
        sizes = ", ".join(f"{tag.name!r} has {tag.shape[0]}" for tag in found)
        names = ", ".join(sorted({repr(tag.name) for tag in wrong}))
        raise ValueError(
            f"in {called(layer)} the leading size of {names} is not the row capacity {capacity} ({sizes}). "
            "All stashed tensors of a layer have the same rows; move a tensor with other rows to keep=(), or set "
            "row_capacity to the right size"
        )
    return tuple(found)


def hoisted_constants(layer: Callable[..., Any], traced: core.ClosedJaxpr) -> list[Any]:
    """The traced integers that the layer closes over, to be passed as arguments; a traced float is an error."""
    hoisted = [const for const in traced.consts if isinstance(const, jax.core.Tracer)]
    for const in hoisted:
        aval = jax.typeof(const)
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            raise ValueError(
                f"{called(layer)} closes over a traced {aval.dtype}{list(aval.shape)} value. Its gradient "
                "would be lost: only arguments are differentiated. Pass it as shared=… (the layer then takes "
                "(params, carry, shared)), or stack it into params."
            )
    return hoisted


@jax.custom_jvp
def first_order_only(values: Any) -> Any:
    """The identity, which raises when it is differentiated."""
    return values


@first_order_only.defjvp
def _second_order(primals: Any, tangents: Any) -> Any:
    # Raw bits in a buffer have no tangent: without this error, tags of two dtypes would silently give wrong
    # numbers.
    raise NotImplementedError(
        "stash_scan is differentiated twice (a Hessian, a gradient of a gradient, jvp of grad), but its "
        "buffer has no derivative. Use lax.scan over jax.checkpoint(layer, policy=…) in this function"
    )


def matching_carry(layer: Callable[..., Any], carry: Any, new_carry: Any) -> list[Any]:
    before_tree: Any = jax.tree.structure(carry)
    after_tree: Any = jax.tree.structure(new_carry)
    if before_tree != after_tree:
        raise TypeError(
            f"{called(layer)} was given a carry of structure {before_tree} and returned "
            f"{after_tree}; a scanned layer must return the structure that it is given"
        )
    out = []
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(carry), jax.tree.leaves(new_carry)):
        before, after = jax.typeof(old), jax.typeof(new)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise TypeError(
                f"{called(layer)} changes carry{jax.tree_util.keystr(path)} from {before.str_short()} to "
                f"{after.str_short()}; a scanned layer must return the shape and dtype that it is given: cast or "
                "reshape it back"
            )
        out.append(jax.lax.convert_element_type(new, before.dtype) if after.weak_type else new)
    return out


def find_rows(layer: Callable[..., Any], aux: Any) -> tuple[int, int] | None:
    """Positions of start and count among the leaves of aux, which may be a bare (start, count)."""
    is_rows = lambda node: isinstance(node, Rows)  # noqa: E731
    rows = [node for node in jax.tree.leaves(aux, is_leaf=is_rows) if is_rows(node)]
    if len(rows) > 1:
        raise ValueError(
            f"{called(layer)} returns {len(rows)} Rows; expected one, for all stashed tensors of the layer"
        )
    if not rows:
        return (0, 1) if _is_bare_rows(aux) else None
    for field, value in (("start", rows[0].start), ("count", rows[0].count)):
        if not jnp.issubdtype(jax.typeof(value).dtype, jnp.integer):
            raise TypeError(f"Rows.{field} of {called(layer)} is {jax.typeof(value)}: expected an integer")
    position = 0
    for node in jax.tree.leaves(aux, is_leaf=is_rows):
        if is_rows(node):
            break
        position += 1
    return position, position + 1


def _is_bare_rows(aux: Any) -> bool:
    return (
        isinstance(aux, tuple)
        and len(aux) == 2
        and all(hasattr(v, "dtype") or isinstance(v, int) for v in aux)
        and all(jnp.issubdtype(jax.typeof(v).dtype, jnp.integer) for v in aux)
        and jax.typeof(aux[0]).shape == jax.typeof(aux[1]).shape
    )


def called(layer: Callable[..., Any]) -> str:
    return f"layer {getattr(layer, '__name__', type(layer).__name__)!r}"
