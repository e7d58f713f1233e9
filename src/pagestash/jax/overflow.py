"""What happens to a layer that found no room, under the policies `poison` and `error`."""

from typing import Any

import jax
import jax.numpy as jnp

from .policy import StashReport
from .shards import Shards


class StashOverflow(RuntimeError):
    """The buffer was too small, under `on_overflow="error"`; jax wraps this in its runtime error."""


def poisoned(overflowed: jax.Array, leaves: list[Any]) -> list[Any]:
    """The leaves, with all floats NaN if anything overflowed."""
    return [
        jnp.where(overflowed, jnp.full((), jnp.nan, leaf.dtype), leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else leaf
        for leaf in leaves
    ]


def raised_on(report: StashReport, shards: Shards) -> jax.Array:
    """`report.overflowed`, passed through a callback that raises `StashOverflow` if it is true.

    The callback runs on every device, and later operations must use its result: if one device raised while the
    others continued, these would wait for it in their next collective.
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
