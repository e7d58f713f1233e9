"""What a layer without room shows to the outside, where the policy is not to compute it again."""

from typing import Any

import jax
import jax.numpy as jnp

from .policy import StashReport
from .shards import Shards


class StashOverflow(RuntimeError):
    """A layer's rows found no room, under `on_overflow="error"`; jax wraps it in its runtime error."""


def poisoned(overflowed: jax.Array, leaves: list[Any]) -> list[Any]:
    """The leaves, with every number NaN if anything overflowed."""
    return [
        jnp.where(overflowed, jnp.full((), jnp.nan, leaf.dtype), leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else leaf
        for leaf in leaves
    ]


def raised_on(report: StashReport, shards: Shards) -> jax.Array:
    """`report.overflowed`, by way of a callback that raises `StashOverflow` where it is true.

    The callback runs on every device, and what comes after has to use its answer: if one device raised while
    the others went on, these would wait for it in their next collective.
    """
    message = (
        "stash overflow: {wanted} rows wanted and {capacity} in the buffer; raise capacity_factor, "
        "or use on_overflow='recompute'"
    )

    def on_host(overflowed: Any, wanted: Any, capacity: Any) -> Any:
        if overflowed:
            raise StashOverflow(message.format(wanted=int(wanted), capacity=int(capacity)))
        return overflowed

    def ask(*values: jax.Array) -> jax.Array:
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.bool_), *values)

    return shards.everywhere(ask, report.overflowed, report.rows_wanted, report.rows_capacity)
